# pyright: basic
"""The student's engine: samples token ids and takes new weights in place, without draining.

The order of an update, and what it keeps true:

1. The gate closes: new requests wait outside.
2. The scheduler pauses between two steps; running sequences stay as they are.
3. The worker replaces the weights, or refuses and keeps the old ones (``actors.vllm.worker``).
4. The engine's weight version changes, so each token's version is that of the weights it was
   sampled with. A sequence goes on from the keys and values that it has.
5. Requests without a token yet are taken back and submitted again, and the gate opens: what
   begins now has the new version in the salt of its prefix-cache keys, so that no block computed
   with older weights is found by it.
6. The scheduler resumes.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from itertools import count
from time import perf_counter

import numpy as np
import numpy.typing as npt
from vllm import RequestOutput, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from opdkit.actors.vllm.engine_process import (
    engine_errors,
    prompt_ids,
    start_engine,
    stop_engine,
)
from opdkit.actors.vllm.engine_settings import student_arguments
from opdkit.actors.vllm.stage_clock import StageClock
from opdkit.actors.vllm.student_stats import StudentStats
from opdkit.actors.vllm.token_chunks import sampling_params, token_chunk
from opdkit.actors.vllm.version_spans import VersionStarts
from opdkit.protocols.config import EngineSection
from opdkit.protocols.errors import GenerationError, PromptError, WeightUpdateError
from opdkit.protocols.messages import GenerateRequest, TokenChunk, WeightManifest

ABORTED = "abort"


class StudentEngine:
    """One vLLM engine that samples from the weights last applied; before that, requests wait."""

    def __init__(self, engine: AsyncLLM, *, max_model_len: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self._clock = StageClock()
        self._gate = asyncio.Event()
        self._served: WeightManifest | None = None
        self._unstarted: set[str] = set()
        """Engine requests that have no token yet."""
        self._taken_back: set[str] = set()
        self._serial = count()
        self._num_cached_tokens = 0
        self._num_updates = 0
        self._last_update_s = 0.0

    @classmethod
    async def start(cls, section: EngineSection, *, seed: int) -> "StudentEngine":
        """Start the engine's process."""
        engine = await start_engine(partial(student_arguments, section, seed=seed))
        return cls(engine, max_model_len=section.max_model_len)

    @property
    def served(self) -> WeightManifest | None:
        """The weights that are served; None: none were applied yet."""
        return self._served

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the reply. Closing or cancelling the iterator frees the engine's request.

        Raises:
            PromptError: no room for a token, or ids that the model does not have.
            GenerationError: the engine answered for another prompt.
            ReplicaLost: the engine's process died.
        """
        prompt = prompt_ids(self._engine, request.token_ids)
        params = sampling_params(request, max_tokens=self._room(prompt, request.max_tokens))
        with self._clock.request(len(prompt)), engine_errors(f"request {request.request_id}"):
            is_done = False
            while not is_done:
                await self._gate.wait()
                is_done = True
                async with aclosing(self._attempt(request.request_id, prompt, params)) as chunks:
                    async for chunk in chunks:
                        if chunk is None:
                            is_done = False
                        else:
                            yield chunk

    async def apply(self, manifest: WeightManifest) -> str:
        """Serve other weights from the next step on; see the module's docstring.

        Returns:
            The checksum of the weights as the engine read them.

        Raises:
            WeightUpdateError: the engine refused them and serves what it served before.
            ReplicaLost: the engine's process died.
        """
        began_s = perf_counter()
        self._gate.clear()
        try:
            with engine_errors(f"weights of version {manifest.policy_version}"):
                await self._engine.pause_generation(mode="keep", clear_cache=False)
                try:
                    checksum = await self._replace_weights(manifest)
                    self._served = manifest
                    await self._take_back_unstarted()
                finally:
                    await self._engine.resume_generation()
        finally:
            if self._served is not None:
                self._gate.set()
        self._num_updates += 1
        self._last_update_s = perf_counter() - began_s
        return checksum

    async def probe(self, token_ids: bytes) -> npt.NDArray[np.float32]:
        """Return [T-1]: log-probability of each of [T] int32 ids but the first, at temperature 1.

        Raises:
            PromptError: ids that the model does not have, or too many.
            ReplicaLost: the engine's process died.
        """
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(prompt_ids(self._engine, token_ids))
        outputs = self._engine.generate(prompt, params, self._next_id("probe"))
        with engine_errors("probe"):
            async with aclosing(outputs):
                flat = (await anext(outputs)).prompt_logprobs
        assert isinstance(flat, FlatLogprobs), "asked for with flat_logprobs"
        return np.asarray(flat.logprobs, np.float32)

    async def check_health(self) -> None:
        """Do nothing while the engine lives.

        Raises:
            ReplicaLost: its process died.
        """
        with engine_errors("health check"):
            await self._engine.check_health()

    def stats(self) -> StudentStats:
        """Return the counters as they stand."""
        return StudentStats(
            meter=self._clock.read(),
            served=self._served,
            num_unfinished=self._engine.get_num_unfinished_requests(),
            num_cached_tokens=self._num_cached_tokens,
            num_updates=self._num_updates,
            last_update_s=self._last_update_s,
        )

    def stop(self) -> None:
        """End the engine's process at once; on the event loop."""
        stop_engine(self._engine)

    async def _attempt(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk | None, None]:
        """Yield the chunks of one engine request; None: an update took it back, submit again."""
        engine_id = self._next_id(request_id)
        tokens = tokens_input(prompt, cache_salt=self._salt())
        num_tokens = 0
        self._unstarted.add(engine_id)
        try:
            async with aclosing(self._engine.generate(tokens, params, engine_id)) as outputs:
                async for output in outputs:
                    if engine_id in self._taken_back:
                        yield None
                        return
                    if engine_id in self._unstarted:
                        self._begin(engine_id, output, prompt)
                    starts = self._version_starts(engine_id, output)
                    chunk = token_chunk(output.outputs[0], first=num_tokens, starts=starts)
                    num_tokens += chunk.num_tokens
                    self._clock.add_generated(chunk.num_tokens)
                    yield chunk
        finally:
            self._unstarted.discard(engine_id)
            self._taken_back.discard(engine_id)

    def _begin(self, engine_id: str, output: RequestOutput, prompt: list[int]) -> None:
        self._unstarted.discard(engine_id)
        self._num_cached_tokens += output.num_cached_tokens or 0
        if output.prompt_token_ids != prompt:
            raise GenerationError(f"{engine_id}: the reply is to other prompt ids than were sent")

    def _version_starts(self, engine_id: str, output: RequestOutput) -> VersionStarts:
        """Return where the versions of a reply begin.

        The engine states them with a reply's last output only. Up to there its front end keeps
        them, and has recorded those of every token that it has handed out.
        """
        if output.finished:
            spans = output.outputs[0].weight_versions or ()
            return [(span.version, span.start) for span in spans]
        processor = self._engine.output_processor
        [internal_id] = processor.external_req_ids[engine_id]
        return processor.request_states[internal_id].weight_version_starts

    async def _replace_weights(self, manifest: WeightManifest) -> str:
        [answer] = await self._engine.collective_rpc(
            "replace_weights", args=(manifest.location, manifest.checksum)
        )
        if "refusal" in answer:
            raise WeightUpdateError(answer["refusal"])
        await self._engine.update_weight_version(str(manifest.policy_version))
        checksum: str = answer["checksum"]
        return checksum

    async def _take_back_unstarted(self) -> None:
        self._taken_back |= self._unstarted
        await self._engine.abort(list(self._unstarted))

    def _room(self, prompt: list[int], max_tokens: int) -> int:
        room = self._max_model_len - len(prompt)
        if room < 1 or not prompt:
            raise PromptError(
                f"the history has {len(prompt)} tokens, but must have at least 1 and less than "
                f"student.max_model_len, {self._max_model_len}"
            )
        return min(max_tokens, room)

    def _salt(self) -> str:
        # The checksum too: after a return to an older checkpoint a version is made twice.
        assert self._served is not None, "the gate is closed until weights are served"
        return f"{self._served.policy_version}-{self._served.checksum}"

    def _next_id(self, request_id: str) -> str:
        return f"{request_id}/{next(self._serial)}"
