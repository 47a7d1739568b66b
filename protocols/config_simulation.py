"""The section of a job that says how fast its parts are, for ``opdkit simulate``."""

from opdkit.protocols.config_fields import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


class SimulationSection(Section, frozen=True, kw_only=True):
    """Lengths and speeds of the simulated parts; a run does not look at it.

    The defaults are of a model of some billion parameters on a GPU.
    """

    prompt_tokens: PositiveInt = 200
    """Of every prompt."""
    reply_tokens_median: PositiveFloat = 300.0
    """Reply lengths are lognormal, cut at ``rollout.max_new_tokens``."""
    reply_tokens_sigma: NonNegativeFloat = 0.8
    """Standard deviation of the length's natural logarithm."""
    decode_step_s: PositiveFloat = 0.02
    """One token of every active sequence of a student replica: reading the weights."""
    decode_sequence_s: NonNegativeFloat = 0.0001
    """On top of it for each active sequence; 0: a decoder of fixed speed."""
    score_request_s: PositiveFloat = 0.01
    """A teacher replica scores one sequence after the other: this long for each."""
    score_token_s: NonNegativeFloat = 0.00005
    """And this long for each of its tokens."""
    train_step_s: NonNegativeFloat = 0.5
    """One optimizer step, besides its tokens."""
    train_token_s: NonNegativeFloat = 0.0005
    """Each token of a data-parallel rank's part of the batch."""
    export_s: NonNegativeFloat = 0.2
    """The trainer's part of a publication of weights."""
    update_s: NonNegativeFloat = 0.2
    """For which a student replica makes no token when it takes new weights."""
