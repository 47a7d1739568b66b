"""The loop of one trajectory: its turns, its hooks, its record.

It waits for the student and for the scheduler's hooks, one after the other, and for nobody else.
Order within a turn: generate, append or continue, ``on_turn_end``, merge infos, ``check_finished``
unless that is decided, stop at max_turns, ``step``.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from opdkit.engine.conversation import add_text, drop_dummies
from opdkit.engine.history import History, TurnPlan, plan_turn
from opdkit.engine.reply import Reply, ReplySampler
from opdkit.engine.scheduling.contract import (
    Choice,
    ReplyMessage,
    RolloutOutput,
    RolloutRequest,
    Scheduler,
)
from opdkit.engine.scheduling.hooks import HookRunner, Pause, finish_despite_cancellation
from opdkit.engine.scheduling.turn_results import (
    StepResult,
    TurnVerdict,
    checked_finish,
    checked_outputs,
)
from opdkit.engine.token_record import TokenSequence
from opdkit.protocols.errors import HookError, HookTimeout, OpdkitError, PromptError, SampleError
from opdkit.protocols.messages import Segment
from opdkit.protocols.roles import ChatTemplate

MEDIA_COLUMNS = ("images", "videos", "audios")
"""Infos of these names replace the sample's."""


class Trajectory:
    """One attempt at one trajectory; the ``RolloutConfig`` of its scheduler."""

    def __init__(
        self,
        request: RolloutRequest,
        *,
        scheduler: Scheduler,
        hooks: HookRunner,
        sampler: ReplySampler,
        template: ChatTemplate,
        max_turns: int,
        max_new_tokens: int,
        max_model_len: int,
        on_closed_segment: Callable[[Segment], object],
        counters: Counter[str],
    ) -> None:
        """Assemble the trajectory.

        Args:
            request: Its beginning.
            scheduler: Shared with other trajectories.
            hooks: Calls the scheduler.
            sampler: Draws this trajectory's replies.
            template: The student's; called in threads.
            max_turns: Of the job; the scheduler's own may be smaller.
            max_new_tokens: Of one reply.
            max_model_len: Of a sequence, prompt and reply.
            on_closed_segment: Told each segment that is final while the trajectory goes on.
            counters: Of named events.
        """
        own_limit = scheduler.max_turns
        self.max_turns = max_turns if own_limit is None else min(max_turns, own_limit)
        self.num_turns = 0
        self.finish_reason = ""
        self._request = request
        self._hooks = hooks
        self._sampler = sampler
        self._template = template
        self._max_new_tokens = max_new_tokens
        self._max_model_len = max_model_len
        self._on_closed_segment = on_closed_segment
        self._counters = counters
        self._sequences: list[TokenSequence] = []
        self._history: History | None = None
        self._pause = Pause()
        self._engine_fault: Exception | None = None

    async def run(self) -> list[RolloutOutput]:
        """Run the trajectory to its end and clean up after it, whatever happens.

        Raises:
            SampleError: this attempt failed.
            InfrastructureError: the student could not be reached.
            JobFailed: a hook timed out, and the policy is to end the job.
        """
        try:
            await self._hooks.call("on_trajectory_start", [self._request])
            result = await self._run_scheduler(self._request)
            outputs = checked_outputs(result)
        except BaseException as error:
            await self._clean_up_after(error)
            raise
        await finish_despite_cancellation(
            self._hooks.call("on_trajectory_end", result, None), name="on_trajectory_end"
        )
        return outputs

    async def _run_scheduler(self, request: RolloutRequest) -> object:
        try:
            return await self._hooks.call_run(self._pause, request, self)
        except HookError:
            if self._engine_fault is not None:
                raise self._engine_fault from None  # no fault of the scheduler's
            raise

    async def generate(self, request: RolloutRequest) -> Choice:
        """Sample one reply; see ``RolloutConfig.generate``."""
        with self._pause.paused():
            try:
                return await self._generate(request)
            except OpdkitError:
                raise
            except Exception as error:
                self._engine_fault = error
                raise

    async def _generate(self, request: RolloutRequest) -> Choice:
        self._request = request
        drop_dummies(request.messages)
        plan = await self._plan(request)
        room = self._max_model_len - plan.num_prompt_tokens(self._num_recorded)
        if room < 1:
            raise PromptError(
                f"turn {self.num_turns + 1}: the conversation has "
                f"{self._max_model_len - room} tokens, but must have fewer than "
                f"student.max_model_len, {self._max_model_len}"
            )
        self._continue_record(plan)
        sequence = self._sequences[-1]
        prompt = sequence.token_ids[:]
        reply = await self._sampler.sample(
            prompt, max_tokens=min(self._max_new_tokens, room), turn=self.num_turns + 1
        )
        text = await asyncio.to_thread(self._template.decode, reply.token_ids.tolist())
        sequence.add_reply(reply, in_turn=plan.in_turn)
        add_text(request.messages, text)
        self._history = History(
            rendered=plan.rendered,
            num_messages=len(request.messages) - 1,
            reply_text=request.messages[-1]["content"],
        )
        self.num_turns += 1
        self.finish_reason = reply.finish_reason
        return _choice(text, reply, prompt.tolist())

    async def run_turns(self, request: RolloutRequest) -> RolloutOutput:
        """Run the standard loop; see ``RolloutConfig.run_turns``."""
        with self._pause.paused():
            goes_on = True
            while goes_on:
                try:
                    choice = await self.generate(request)
                except PromptError:
                    if not self.num_turns:
                        raise
                    # A good beginning is no reason to lose what was sampled.
                    self._counters["context_full"] += 1
                    break
                request, goes_on = await self._end_turn(request, choice)
            return self.output(request)

    def output(self, request: RolloutRequest) -> RolloutOutput:
        """Return everything recorded so far."""
        turns = [turn for sequence in self._sequences for turn in sequence.turns()]
        has_logprobs = all(sequence.has_logprobs for sequence in self._sequences)
        return RolloutOutput(
            uuid=request.uuid,
            messages=request.messages,
            segments=tuple(sequence.segment() for sequence in self._sequences),
            response_token_ids=[token_ids for token_ids, _, _ in turns],
            response_loss_mask=[mask for _, mask, _ in turns],
            rollout_logprobs=[logprobs for _, _, logprobs in turns] if has_logprobs else [],
            rollout_infos={**request.infos, "num_turns": self.num_turns},
        )

    async def _plan(self, request: RolloutRequest) -> TurnPlan:
        try:
            return await asyncio.to_thread(
                plan_turn,
                self._template,
                request.messages,
                tools=request.tools,
                recorded=self._sequences[-1].token_ids if self._sequences else (),
                history=self._history,
            )
        except OpdkitError:
            raise
        except Exception as error:  # a program that comes with the model
            kind = HookError if self.num_turns else PromptError
            raise kind(
                f"turn {self.num_turns + 1}: the chat template failed on these messages with "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def _num_recorded(self) -> int:
        return len(self._sequences[-1].token_ids) if self._sequences else 0

    def _continue_record(self, plan: TurnPlan) -> None:
        if plan.prompt is None:
            self._sequences[-1].insert(plan.insertion, in_turn=plan.in_turn)
            return
        if self._sequences:
            self._counters["history_rewrites"] += 1
            self._on_closed_segment(self._sequences[-1].segment())
        self._sequences.append(TokenSequence(plan.prompt))

    async def _end_turn(
        self, request: RolloutRequest, choice: Choice
    ) -> tuple[RolloutRequest, bool]:
        """Return the request to go on with, and whether to."""
        before = request.copy() if self._hooks.tells_timeouts else None
        is_last = self.num_turns >= self.max_turns
        try:
            if await self._is_done(request, choice) or is_last:
                return request, False
            return await self._step(request, choice), True
        except HookTimeout:
            if before is None:
                raise
            # Not the request itself: an abandoned hook may still be changing it.
            if not is_last:
                error = f"Error: no answer within {self._hooks.timeout_s:g} s."
                before.messages.append({"role": "user", "content": error})
            return before, not is_last

    async def _is_done(self, request: RolloutRequest, choice: Choice) -> bool:
        result = await self._hooks.call("on_turn_end", request, choice, self.num_turns)
        verdict = TurnVerdict.from_hook(result)
        _merge_infos(request, verdict.rollout_infos)
        if verdict.done is not None:
            return verdict.done
        result = await self._hooks.call("check_finished", request, choice, self.num_turns)
        return checked_finish(result)

    async def _step(self, request: RolloutRequest, choice: Choice) -> RolloutRequest:
        result = await self._hooks.call("step", request, choice, self.num_turns)
        step = StepResult.from_hook(result, request=request)
        following = step.infer_request
        if step.rewrites_reply:
            self._rewrite_reply(step)
        if following is not request:
            following.uuid = request.uuid
            following.data_dict = following.data_dict or request.data_dict
            following.tools = following.tools or request.tools
            following.infos = request.infos
        _merge_infos(following, step.rollout_infos)
        return following

    def _rewrite_reply(self, step: StepResult) -> None:
        num_foreign = self._sequences[-1].rewrite_reply(
            step.response_token_ids, step.response_loss_mask, step.rollout_logprobs
        )
        self._counters["foreign_tokens"] += num_foreign
        assert self._history is not None, "step comes after a reply"
        place, messages = self._history.num_messages, step.infer_request.messages
        if step.response_token_ids is not None and place < len(messages):
            # The scheduler vouches that its ids stand for the text that it left there.
            text = str(messages[place].get("content") or "")
            self._history = replace(self._history, reply_text=text)

    async def _clean_up_after(self, error: BaseException) -> None:
        output = self.output(self._request)
        try:
            await finish_despite_cancellation(
                self._hooks.call("on_trajectory_end", output, error), name="on_trajectory_end"
            )
        except SampleError as second:
            self._counters["end_hook_errors"] += 1
            error.add_note(f"on_trajectory_end failed after it: {second}")


def _choice(text: str, reply: Reply, prompt: list[int]) -> Choice:
    return Choice(
        message=ReplyMessage(content=text),
        token_ids=reply.token_ids.tolist(),
        logprobs=reply.logprobs.tolist(),
        finish_reason=reply.finish_reason,
        prompt_token_ids=prompt,
        spans=tuple(reply.spans),
    )


def _merge_infos(request: RolloutRequest, infos: Mapping[str, Any]) -> None:
    request.infos.update(infos)
    request.data_dict.update({key: infos[key] for key in MEDIA_COLUMNS if key in infos})
