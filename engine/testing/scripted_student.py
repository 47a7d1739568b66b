"""A student that says what it is told, and fails when it is told."""

import asyncio
import re
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import GenerateRequest, TokenChunk, VersionSpan

LOGPROB = -0.5
"""Of every scripted token."""
_NOTATION = re.compile(r"(?P<text>[^:]*):\[(?P<ids>[\d,\s]*)\](?P<length>/len)?")


@dataclass(frozen=True, kw_only=True)
class ScriptedReply:
    """What one request gets."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    """What the ids shall decode to: for ``LetterTemplate``."""
    finish_reason: str = "stop"
    policy_version: int = 0
    delay_s: float = 0.0
    """Before the first token."""
    error: Exception | None = None
    """Raised after the tokens, instead of an end."""
    hangs: bool = False
    """Gives the tokens and then nothing."""


def parse_reply(notation: str) -> ScriptedReply:
    """Read ``x:[1,2]``, or ``x:[1,2]/len`` for a reply that was cut."""
    match = _NOTATION.fullmatch(notation)
    if match is None:
        raise ValueError(f"reply {notation!r} is not of the form text:[id,id] or text:[id]/len")
    token_ids = tuple(int(token) for token in match["ids"].split(",") if token.strip())
    finish_reason = "length" if match["length"] else "stop"
    return ScriptedReply(token_ids=token_ids, text=match["text"], finish_reason=finish_reason)


class ScriptedStudent:
    """A ``StudentSampler`` in which every trajectory goes through a script, request by request."""

    def __init__(
        self,
        script: Sequence[ScriptedReply],
        *,
        by_session: Mapping[str, Sequence[ScriptedReply]] | None = None,
    ) -> None:
        """Give the script; ``by_session`` names trajectories that have one of their own."""
        self._script = script
        self._by_session = by_session or {}
        self._num_given: defaultdict[str, int] = defaultdict(int)
        self.requests: list[GenerateRequest] = []
        self.asked = asyncio.Event()
        """Set by the first request."""
        self.num_open = 0
        """Streams that are neither ended nor closed."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream the next reply of the script, token by token, cut at ``max_tokens``."""
        self.requests.append(request)
        self.asked.set()
        script = self._by_session.get(request.session_id, self._script)
        reply = script[self._num_given[request.session_id]]
        self._num_given[request.session_id] += 1
        self.num_open += 1
        try:
            await asyncio.sleep(reply.delay_s)
            token_ids = reply.token_ids[: request.max_tokens]
            is_cut = len(token_ids) < len(reply.token_ids)
            is_whole = not reply.hangs and reply.error is None
            for index, token_id in enumerate(token_ids):
                is_last = is_whole and index == len(token_ids) - 1
                reason = "length" if is_cut else reply.finish_reason
                yield _chunk([token_id], reply.policy_version, reason if is_last else None)
                await asyncio.sleep(0)
            if is_whole and not token_ids:
                yield _chunk([], reply.policy_version, reply.finish_reason)
            if reply.hangs:
                await asyncio.Event().wait()
            if reply.error is not None:
                raise reply.error
        finally:
            self.num_open -= 1


def _chunk(token_ids: Sequence[int], version: int, finish_reason: str | None) -> TokenChunk:
    span = VersionSpan(policy_version=PolicyVersion(version), num_tokens=len(token_ids))
    return TokenChunk(
        token_ids=array("i", token_ids).tobytes(),
        logprobs=array("f", [LOGPROB] * len(token_ids)).tobytes(),
        spans=(span,),
        finish_reason=finish_reason,
    )
