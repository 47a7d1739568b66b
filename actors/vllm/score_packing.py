"""From vLLM's log-probabilities of a prompt to the teacher's scores at its supervised positions.

Shapes: T tokens, P supervised positions, k best tokens, W columns of the teacher's output layer,
V ids of the vocabulary that teacher and student share (the first V of the W).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from opdkit.protocols.errors import NonFiniteScoresError, TeacherAlignmentError
from opdkit.protocols.messages import ScoreRequest, TeacherScores

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PromptLogprobs:
    """What the engine returns for a prompt; row j predicts token j + 1."""

    token_ids: Ids
    """[T-1, 1+n]: the token that stands there, then the n best, best first (n is k or W)."""
    logprobs: Floats
    """[T-1, 1+n], natural log."""


def supervised_positions(request: ScoreRequest) -> Ids:
    """Return the positions [P], checked.

    Raises:
        TeacherAlignmentError: they do not increase, or do not lie within 1 … T-1.
    """
    num_tokens = len(request.token_ids) // 4
    positions = np.frombuffer(request.positions, "<i4")
    if len(positions) and (
        positions[0] < 1 or positions[-1] >= num_tokens or np.any(np.diff(positions) < 1)
    ):
        raise TeacherAlignmentError(
            f"sample {request.sample_id}: positions must increase within 1 … {num_tokens - 1}, "
            f"got {len(positions)} from {positions.min()} to {positions.max()}"
        )
    return positions


def pack_scores(
    request: ScoreRequest, prompt: PromptLogprobs, *, vocab_size: int, top_k: int | None
) -> TeacherScores:
    """Keep what the loss needs.

    Args:
        request: what was asked.
        prompt: what the engine returned.
        vocab_size: V. Ids from V on are padding of the output layer and carry no probability.
        top_k: k, or None for all V.

    Raises:
        TeacherAlignmentError: the engine answered for other ids than were sent.
        NonFiniteScoresError: NaN or +inf. (-inf is a probability of 0.)
    """
    positions = supervised_positions(request)
    sent = np.frombuffer(request.token_ids, "<i4")
    _check_alignment(request.sample_id, sent, prompt)
    rows_token_ids = prompt.token_ids[positions - 1]
    rows_logprobs = prompt.logprobs[positions - 1]
    _check_finite(request.sample_id, positions, rows_logprobs)
    sampled, best_ids, best = rows_logprobs[:, 0], rows_token_ids[:, 1:], rows_logprobs[:, 1:]
    if top_k is None:
        token_ids, logprobs = b"", _in_id_order(best_ids, best, vocab_size)
        sampled = np.take_along_axis(logprobs, sent[positions][:, None], axis=1)[:, 0]
    else:
        best_ids, logprobs = _within_vocabulary(best_ids, best, vocab_size)
        token_ids = best_ids.astype("<i4").tobytes()
    return TeacherScores(
        num_positions=len(positions),
        support_size=logprobs.shape[1],
        token_ids=token_ids,
        logprobs=logprobs.astype("<f4").tobytes(),
        sampled_logprobs=sampled.astype("<f4").tobytes(),
        tail_mass=tail_mass(logprobs).astype("<f4").tobytes(),
    )


def tail_mass(logprobs: Floats) -> Floats:
    """Return [P]: 1 - Σ exp over each row, within [0, 1], without cancellation near 1."""
    wide = logprobs.astype(np.float64)
    peak = np.max(wide, axis=1, initial=-np.inf)
    finite_peak = np.where(np.isfinite(peak), peak, 0.0)
    with np.errstate(divide="ignore"):  # a row of zero probabilities: log 0 is the right answer
        log_total = finite_peak + np.log(np.exp(wide - finite_peak[:, None]).sum(axis=1))
    return np.clip(-np.expm1(log_total), 0.0, 1.0).astype(np.float32)


def _check_alignment(sample_id: str, sent: Ids, prompt: PromptLogprobs) -> None:
    num_rows = len(prompt.token_ids)
    if num_rows != len(sent) - 1:
        raise TeacherAlignmentError(
            f"sample {sample_id}: {len(sent)} ids were sent, but {num_rows} were scored"
        )
    wrong = np.flatnonzero(prompt.token_ids[:, 0] != sent[1:])
    if len(wrong):
        place = int(wrong[0]) + 1
        raise TeacherAlignmentError(
            f"sample {sample_id}: id {prompt.token_ids[place - 1, 0]} was scored at position "
            f"{place}, but {sent[place]} was sent ({len(wrong)} positions differ)"
        )


def _check_finite(sample_id: str, positions: Ids, logprobs: Floats) -> None:
    bad = np.isnan(logprobs) | np.isposinf(logprobs)
    if bad.any():
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        raise NonFiniteScoresError(
            f"sample {sample_id}: {np.count_nonzero(bad)} of the teacher's log-probabilities are "
            f"NaN or +inf, the first at position {positions[row]}"
        )


def _in_id_order(token_ids: Ids, logprobs: Floats, vocab_size: int) -> Floats:
    """Return [P, V]; renormalised if padding columns fell away."""
    ordered = np.empty_like(logprobs)
    np.put_along_axis(ordered, token_ids.astype(np.int64), logprobs, axis=1)
    if vocab_size == ordered.shape[1]:
        return ordered
    kept = ordered[:, :vocab_size]
    padding = np.exp(ordered[:, vocab_size:].astype(np.float64)).sum(axis=1)
    return (kept - np.log1p(-padding)[:, None]).astype(np.float32)


def _within_vocabulary(token_ids: Ids, logprobs: Floats, vocab_size: int) -> tuple[Ids, Floats]:
    """Turn padding ids among the k best into unused ids of probability 0."""
    foreign = token_ids >= vocab_size
    if not foreign.any():
        return token_ids, logprobs
    token_ids, logprobs = token_ids.copy(), logprobs.copy()
    logprobs[foreign] = -np.inf
    for row in np.flatnonzero(foreign.any(axis=1)):
        num_foreign = int(foreign[row].sum())
        candidates = np.arange(token_ids.shape[1] + num_foreign, dtype=np.int32)
        unused = np.setdiff1d(candidates, token_ids[row][~foreign[row]])
        token_ids[row][foreign[row]] = unused[:num_foreign]
    return token_ids, logprobs
