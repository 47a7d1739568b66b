# pyright: basic
"""The teacher's engine: log-probabilities at the supervised positions of given ids."""

import asyncio
from functools import partial
from itertools import count

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from opdkit.actors.vllm.engine_process import (
    engine_errors,
    prompt_ids,
    start_engine,
    stop_engine,
)
from opdkit.actors.vllm.engine_settings import num_prompt_logprobs, teacher_arguments
from opdkit.actors.vllm.score_packing import PromptLogprobs, pack_scores, supervised_positions
from opdkit.actors.vllm.stage_clock import StageClock
from opdkit.engine.credits import Credits
from opdkit.protocols.config import LossSection, TeacherSection
from opdkit.protocols.errors import ConfigError, PromptError, ReplicaLost
from opdkit.protocols.messages import ScoreRequest, StageMeter, TeacherScores

MAX_CELLS_IN_FLIGHT = 32_000_000
"""Log-probabilities being made or packed at once, over all requests of a replica.

A cell takes 8 bytes (id and value) in the engine and again here: half a gigabyte at most. One
request that is larger runs alone.
"""


class TeacherEngine:
    """One vLLM engine that scores."""

    def __init__(
        self, engine: AsyncLLM, *, section: TeacherSection, loss: LossSection, vocab_size: int
    ) -> None:
        self._engine = engine
        self._section = section
        self._top_k = loss.top_k if loss.support == "top_k" else None
        self._vocab_size = vocab_size
        self._num_columns = 1 + (self._top_k or engine.model_config.get_vocab_size())
        self._params = SamplingParams(
            max_tokens=1,  # vLLM samples at least one
            prompt_logprobs=num_prompt_logprobs(loss),
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._credits = Credits(MAX_CELLS_IN_FLIGHT)
        self._clock = StageClock()
        self._serial = count()

    @classmethod
    async def start(
        cls, section: TeacherSection, *, loss: LossSection, vocab_size: int
    ) -> "TeacherEngine":
        """Start the engine's process.

        Args:
            section: the teacher.
            loss: which says how much of the distribution is wanted.
            vocab_size: number of ids that teacher and student share.

        Raises:
            ConfigError: the loss wants more tokens than the vocabulary has.
        """
        if loss.support == "top_k" and loss.top_k > vocab_size:
            raise ConfigError(
                f"loss.top_k is {loss.top_k}, but must be at most the vocabulary, {vocab_size}"
            )
        engine = await start_engine(partial(teacher_arguments, section, loss=loss))
        width = engine.model_config.get_vocab_size()
        if vocab_size > width:
            stop_engine(engine)
            raise ConfigError(
                f"the shared vocabulary has {vocab_size} ids, but teacher {section.name} only "
                f"{width}"
            )
        return cls(engine, section=section, loss=loss, vocab_size=vocab_size)

    async def score(self, request: ScoreRequest) -> TeacherScores:
        """Score one sequence. Cancelling frees the engine's request.

        Raises:
            PromptError: the sequence is too long, or has ids that the model does not have.
            TeacherAlignmentError: the positions or the ids that came back are not those sent.
            NonFiniteScoresError: the teacher gave NaN or +inf.
            ReplicaLost: the engine's process died.
        """
        supervised_positions(request)
        prompt = prompt_ids(self._engine, request.token_ids)
        self._check_length(request.sample_id, len(prompt))
        async with self._credits.borrow(len(prompt) * self._num_columns):
            with self._clock.request(len(prompt)), engine_errors(f"sample {request.sample_id}"):
                tensors = await self._prompt_logprobs(request.sample_id, prompt)
            logprobs = PromptLogprobs(
                token_ids=tensors.logprob_token_ids.numpy(), logprobs=tensors.logprobs.numpy()
            )
            return await asyncio.to_thread(
                partial(
                    pack_scores,
                    request,
                    logprobs,
                    vocab_size=self._vocab_size,
                    top_k=self._top_k,
                )
            )

    async def check_health(self) -> None:
        """Do nothing while the engine lives.

        Raises:
            ReplicaLost: its process died.
        """
        with engine_errors("health check"):
            await self._engine.check_health()

    def meter(self) -> StageMeter:
        """Return the counters as they stand."""
        return self._clock.read()

    def stop(self) -> None:
        """End the engine's process at once; on the event loop."""
        stop_engine(self._engine)

    async def _prompt_logprobs(self, sample_id: str, prompt: list[int]) -> LogprobsTensors:
        request_id = f"{sample_id}/{next(self._serial)}"
        collector = await self._engine.add_request(request_id, tokens_input(prompt), self._params)
        try:
            state = self._engine.output_processor.request_states[collector.request_id]
            state.logprobs_processor = _KeepTensors(
                tokenizer=None,
                logprobs=None,
                prompt_logprobs=None,
                cumulative_logprob=None,
                num_logprobs=None,
                num_prompt_logprobs=self._params.prompt_logprobs,
            )
            output = await collector.get()
        except BaseException:
            await self._engine.abort(collector.request_id, internal=True)
            raise
        tensors: object = getattr(output, "prompt_logprobs", None)
        if not isinstance(tensors, LogprobsTensors):
            raise ReplicaLost(f"sample {sample_id}: the engine gave up the request")
        return tensors

    def _check_length(self, sample_id: str, num_tokens: int) -> None:
        longest = self._section.max_model_len - 1
        if not 2 <= num_tokens <= longest:
            raise PromptError(
                f"sample {sample_id} has {num_tokens} tokens, but scoring needs 2 … {longest}: "
                "teacher.max_model_len less one"
            )


class _KeepTensors(LogprobsProcessor):
    """Hands out the engine's tensors as they came.

    vLLM's own makes four Python objects of every cell: at a vocabulary of 50,000, gigabytes for
    one sequence.
    """

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors  # type: ignore[assignment]
