"""The ids of a trajectory, as sent and as sampled: the only source of training sequences.

A record is a list of sequences. All but the last are closed; each becomes a ``Segment``. Masks are
built while ids are added, never computed afterwards from lengths.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, groupby

from opdkit.engine.reply import Reply
from opdkit.protocols.errors import HookError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import Segment, VersionSpan

NO_VERSION = -1
"""Stands at tokens that no student sampled."""


class TokenSequence:
    """Ids with, for each, a mask, a log-probability and a policy version; and where turns lie."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self.token_ids = array("i", prompt)
        self._mask = bytearray(len(self.token_ids))
        self._logprobs = array("f", bytes(4 * len(self.token_ids)))
        self._versions = array("q", [NO_VERSION]) * len(self.token_ids)
        self._turns: list[tuple[int, int]] = []
        self._reply_start = len(self.token_ids)
        self._logprobs_fit = True

    def insert(self, token_ids: Sequence[int], *, in_turn: bool) -> None:
        """Add ids that the student did not sample; ``in_turn``: to the last turn's lists."""
        count = len(token_ids)
        self._extend(token_ids, bytes(count), [0.0] * count, [NO_VERSION] * count)
        if in_turn:
            self._stretch_turn()

    def add_reply(self, reply: Reply, *, in_turn: bool) -> None:
        """Add what the student sampled, as a turn or ``in_turn`` to the last turn's lists."""
        self._reply_start = len(self.token_ids)
        versions = [span.policy_version for span in reply.spans for _ in range(span.num_tokens)]
        self._extend(reply.token_ids, b"\1" * len(reply.token_ids), reply.logprobs, versions)
        if not in_turn:
            self._turns.append((self._reply_start, self._reply_start))
        self._stretch_turn()

    def rewrite_reply(
        self,
        token_ids: Sequence[int] | None,
        mask: Sequence[int] | None,
        logprobs: Sequence[float] | None,
    ) -> int:
        """Replace the last reply by what a scheduler made of it; None: as recorded.

        A token that stands where it was sampled keeps its version and log-probability. Another one
        with mask 1 gets the oldest version of the reply, and no log-probability.

        Returns:
            The number of tokens with mask 1 that the student did not sample there.

        Raises:
            HookError: ids, mask and log-probabilities do not go together.
        """
        start = self._reply_start
        old_mask, old_versions = self._mask[start:], self._versions[start:]
        old_logprobs = self._logprobs[start:]
        new_ids = self.token_ids[start:] if token_ids is None else _checked_ids(token_ids)
        new_mask = _checked_mask(mask, len(new_ids), given=token_ids is not None)
        if mask is None and token_ids is None:
            new_mask = old_mask
        same = _common_prefix(self.token_ids[start:], new_ids)
        kept = [i < same and bool(old_mask[i]) for i in range(len(new_ids))]
        oldest = min(compress(old_versions, old_mask))
        own = iter(logprobs if logprobs is not None else ())
        del self.token_ids[start:], self._mask[start:]
        del self._logprobs[start:], self._versions[start:]
        if logprobs is not None and len(logprobs) != sum(new_mask):
            self._logprobs_fit = False
            own = iter([math.nan] * sum(new_mask))
        self._extend(
            new_ids,
            new_mask,
            [
                0.0 if not m else next(own) if logprobs is not None
                else old_logprobs[i] if kept[i] else math.nan
                for i, m in enumerate(new_mask)
            ],
            [
                NO_VERSION if not m else old_versions[i] if kept[i] else oldest
                for i, m in enumerate(new_mask)
            ],
        )  # fmt: skip
        self._stretch_turn()
        return sum(new_mask) - sum(compress(kept, new_mask))

    def segment(self) -> Segment:
        """Return the sequence as a training segment."""
        spans = tuple(
            VersionSpan(policy_version=PolicyVersion(version), num_tokens=sum(1 for _ in run))
            for version, run in groupby(compress(self._versions, self._mask))
        )
        return Segment(
            token_ids=self.token_ids.tobytes(),
            loss_mask=bytes(self._mask),
            sampler_logprobs=self._logprobs.tobytes() if self.has_logprobs else b"",
            spans=spans,
        )

    @property
    def has_logprobs(self) -> bool:
        """Whether each token with mask 1, and no other, has a log-probability."""
        return self._logprobs_fit and not any(map(math.isnan, compress(self._logprobs, self._mask)))

    def turns(self) -> Iterator[tuple[list[int], list[int], list[float]]]:
        """Yield ids, mask, and log-probabilities of the mask's tokens, turn by turn."""
        for start, stop in self._turns:
            mask = list(self._mask[start:stop])
            logprobs = list(compress(self._logprobs[start:stop], mask))
            yield self.token_ids[start:stop].tolist(), mask, logprobs

    def _extend(
        self,
        token_ids: Iterable[int],
        mask: bytes | bytearray,
        logprobs: Iterable[float],
        versions: Iterable[int],
    ) -> None:
        self.token_ids.extend(token_ids)
        self._mask.extend(mask)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)

    def _stretch_turn(self) -> None:
        self._turns[-1] = (self._turns[-1][0], len(self.token_ids))


def _checked_ids(token_ids: Sequence[int]) -> "array[int]":
    try:
        return array("i", token_ids)
    except (TypeError, OverflowError) as error:
        raise HookError(f"step: response_token_ids are no 32-bit integers: {error}") from error


def _checked_mask(mask: Sequence[int] | None, num_ids: int, *, given: bool) -> bytearray:
    if mask is None:
        return bytearray(b"\1" * num_ids)
    if not given:
        raise HookError(
            f"step: response_loss_mask has {len(mask)} values, but there are 0 "
            "response_token_ids: give the ids with it"
        )
    if len(mask) != num_ids:
        raise HookError(
            f"step: response_loss_mask has {len(mask)} values for {num_ids} response_token_ids"
        )
    if not set(mask) <= {0, 1}:
        raise HookError(f"step: response_loss_mask holds {sorted(set(mask) - {0, 1})}, not 0 or 1")
    return bytearray(map(int, mask))


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
