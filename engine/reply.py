"""One reply of the student, whatever number of replicas it takes.

The sampler waits for the student; chunks wake it. If a replica dies in mid-reply, the tokens that
it gave stay, with their versions, and another one goes on from them.
"""

import hashlib
from array import array
from itertools import count

from opdkit.engine.infrastructure_budget import InfrastructureBudget
from opdkit.engine.stage_watch import StageWatch
from opdkit.engine.tally import Tally
from opdkit.protocols.config import RolloutSection
from opdkit.protocols.errors import GenerationError, InfrastructureError, ReplicaLost
from opdkit.protocols.messages import GenerateRequest, TokenChunk, VersionSpan
from opdkit.protocols.roles import Clock, StudentSampler


class Reply:
    """The tokens of one turn, as the engines gave them."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.spans: list[VersionSpan] = []
        self.finish_reason = ""

    def add(self, chunk: TokenChunk) -> None:
        """Append a chunk."""
        self.token_ids.frombytes(chunk.token_ids)
        self.logprobs.frombytes(chunk.logprobs)
        self.spans.extend(chunk.spans)
        self.finish_reason = chunk.finish_reason or ""


class ReplySampler:
    """Draws the replies of one attempt at a trajectory."""

    def __init__(
        self,
        student: StudentSampler,
        *,
        settings: RolloutSection,
        sample_id: str,
        seed: int,
        attempt: int,
        clock: Clock,
        watch: StageWatch,
        tally: Tally,
        budget: InfrastructureBudget,
    ) -> None:
        self._student = student
        self._settings = settings
        self._sample_id = sample_id
        self._seed = seed
        self._attempt = attempt
        self._clock = clock
        self._watch = watch
        self._tally = tally
        self._budget = budget

    async def sample(self, history: "array[int]", *, max_tokens: int, turn: int) -> Reply:
        """Continue a history by one reply.

        Raises:
            GenerationError: the stream broke its contract.
            PromptError: the history leaves no room for a token.
            InfrastructureError: replicas were lost more often than is allowed.
        """
        started = self._clock.now()
        reply = Reply()
        try:
            for resumption in count():
                request = self._request(history, reply, max_tokens, (turn, resumption))
                try:
                    await self._stream(request, reply)
                except InfrastructureError as error:
                    await self._budget.spend(error, self._watch)
                if reply.finish_reason in ("stop", "length"):
                    break
                if len(reply.token_ids) == max_tokens:
                    reply.finish_reason = "length"  # only the word that it ended was lost
                    break
        finally:
            self._tally.generate_s += self._clock.now() - started
        return _checked(reply, max_tokens, self._sample_id)

    async def _stream(self, request: GenerateRequest, reply: Reply) -> None:
        with self._watch.request(num_prompt_tokens=len(request.token_ids) // 4):
            # Never left early: what ends it (its end, its error, our cancellation) also closes it.
            async for chunk in self._student.generate(request):
                reply.add(chunk)
                self._tally.num_sampled += chunk.num_tokens
                self._watch.add_generated(chunk.num_tokens)
            if reply.finish_reason == "abort":
                raise ReplicaLost(f"request {request.request_id} was aborted by its replica")
            if not reply.finish_reason:
                raise GenerationError(
                    f"request {request.request_id}: the stream ended without a finish reason"
                )

    def _request(
        self, history: "array[int]", reply: Reply, max_tokens: int, part: tuple[int, int]
    ) -> GenerateRequest:
        settings = self._settings
        turn, resumption = part
        return GenerateRequest(
            request_id=f"{self._sample_id}/{self._attempt}/{turn}/{resumption}",
            session_id=self._sample_id,
            token_ids=(history + reply.token_ids).tobytes(),
            max_tokens=max_tokens - len(reply.token_ids),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            seed=derive_seed(self._seed, self._attempt, turn, resumption),
            stop_token_ids=settings.stop_token_ids,
        )


def derive_seed(seed: int, attempt: int, turn: int, resumption: int) -> int:
    """Return a 32-bit seed: unrelated for every request, but the same in every run.

    Requests that shared one would draw the same random numbers, so that a second attempt would
    fail like the first, and turns would be correlated.
    """
    name = f"{seed}/{attempt}/{turn}/{resumption}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little")


def _checked(reply: Reply, max_tokens: int, sample_id: str) -> Reply:
    num_tokens = len(reply.token_ids)
    if not num_tokens:
        raise GenerationError(f"sample {sample_id}: the reply has no token ids")
    if num_tokens > max_tokens:
        raise GenerationError(
            f"sample {sample_id}: the reply has {num_tokens} tokens, {max_tokens} were asked for"
        )
    return reply
