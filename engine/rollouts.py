"""Makes trajectories, has them scored, and hands them to the queue.

Each call of ``run`` is one trajectory. It waits for the student, the scheduler's hooks, the teacher
and for room in the queue; it shares nothing with other trajectories but the event loop. A segment
is scored as soon as it is final, while later turns are still being sampled.
"""

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from opdkit.engine.infrastructure_budget import (
    FIRST_DELAY_S,
    InfrastructureBudget,
    SampleGivenUp,
)
from opdkit.engine.loop_lag import LoopLag
from opdkit.engine.one_error import one_error
from opdkit.engine.reply import ReplySampler
from opdkit.engine.scheduling.contract import RolloutRequest, Scheduler
from opdkit.engine.scheduling.hooks import HookRunner
from opdkit.engine.scored_sample import encode_sample, score_request
from opdkit.engine.serial_template import SerialTemplate
from opdkit.engine.stage_watch import StageWatch
from opdkit.engine.tally import Tally
from opdkit.engine.trajectory import Trajectory
from opdkit.protocols.config import RolloutSection
from opdkit.protocols.errors import (
    HookError,
    HookTimeout,
    InfrastructureError,
    PromptError,
    SampleError,
)
from opdkit.protocols.messages import (
    DeadSample,
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    SampleMeta,
    Segment,
    SegmentShape,
    TeacherScores,
)
from opdkit.protocols.roles import ChatTemplate, Clock, SampleSink, StudentSampler, TeacherScorer

T = TypeVar("T")

FINAL_ERRORS = (PromptError, HookTimeout)
"""Another attempt would fail alike, or hold a slot for another full deadline."""


class Rollouts:
    """A ``RolloutRunner`` on the running event loop."""

    def __init__(
        self,
        *,
        student: StudentSampler,
        teacher: TeacherScorer,
        template: ChatTemplate,
        train_queue: SampleSink,
        evaluation_queue: SampleSink,
        scheduler: Scheduler,
        settings: RolloutSection,
        max_model_len: int,
        clock: Clock,
        first_retry_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        """Assemble the runner.

        Args:
            student: Samples.
            teacher: Scores.
            template: The student's; called in threads, one call at a time.
            train_queue: Takes the samples to train on.
            evaluation_queue: Takes the samples of held-out prompts.
            scheduler: Shared by all trajectories.
            settings: Of sampling, turns, hooks and attempts.
            max_model_len: Of the student, in tokens, prompt and reply.
            clock: For the meters.
            first_retry_delay_s: Wait after a sample's first infrastructure error; then doubled.
        """
        self._student = student
        self._teacher = teacher
        self._template = SerialTemplate(template)
        self._train_queue = train_queue
        self._evaluation_queue = evaluation_queue
        self._scheduler = scheduler
        self._settings = settings
        self._max_model_len = max_model_len
        self._clock = clock
        self._first_retry_delay_s = first_retry_delay_s
        self._student_watch = StageWatch(clock)
        self._teacher_watch = StageWatch(clock)
        self._queue_watch = StageWatch(clock)
        self._lag = LoopLag()
        self._counters: Counter[str] = Counter()
        self._live: set[Tally] = set()
        self._hooks = HookRunner(
            scheduler,
            timeout_s=settings.hook_timeout_s,
            on_timeout=settings.on_hook_timeout,
            counters=self._counters,
        )

    async def run(self, task: RolloutTask) -> RolloutOutcome:
        """Run one trajectory to its end: queued (``SampleMeta``) or given up (``DeadSample``).

        Raises:
            InfrastructureError: the student, teacher or queue served nobody while this sample used
                up its infrastructure budget.
            JobFailed: a hook timed out, and ``rollout.on_hook_timeout`` is ``fail_job``.
            QueueClosed: the queue was closed first.
        """
        tally = Tally()
        outcome: RolloutOutcome | None = None
        self._live.add(tally)
        try:
            with self._lag.watching():
                outcome = await self._try(task, tally)
            return outcome
        finally:
            self._live.remove(tally)
            if outcome is None:
                self._counters["unfinished"] += 1
                self._counters["unfinished_tokens"] += tally.num_tokens

    async def report(self) -> RolloutWorkerReport:
        """Return the meters and counters since the start."""
        return RolloutWorkerReport(
            student=self._student_watch.read(),
            teacher=self._teacher_watch.read(),
            num_in_flight_tokens=sum(tally.num_tokens for tally in self._live),
            loop_lag_p99_s=self._lag.p99_s(),
            counters=dict(self._counters),
        )

    async def _try(self, task: RolloutTask, tally: Tally) -> RolloutOutcome:
        budget = InfrastructureBudget(
            first_delay_s=self._first_retry_delay_s, counters=self._counters
        )
        attempt = 0
        while True:
            try:
                return await self._attempt(task, attempt, tally, budget)
            except SampleGivenUp as decision:
                return self._bury(task, decision.error, attempt + 1, tally)
            except SampleError as error:
                attempt += 1
                if attempt == self._settings.max_attempts or isinstance(error, FINAL_ERRORS):
                    return self._bury(task, error, attempt, tally)
                self._counters["retries"] += 1
                tally.start_attempt()

    async def _attempt(
        self, task: RolloutTask, attempt: int, tally: Tally, budget: InfrastructureBudget
    ) -> SampleMeta:
        scoring: dict[Segment, asyncio.Task[TeacherScores]] = {}
        with one_error():
            async with asyncio.TaskGroup() as tasks:

                def begin_scoring(segment: Segment) -> None:
                    if segment.num_supervised and segment not in scoring:
                        scoring[segment] = tasks.create_task(
                            self._score(segment, task.sample_id, tally, budget),
                            name=f"score {task.sample_id}",
                        )

                trajectory = self._trajectory(task, attempt, tally, budget, begin_scoring)
                outputs = await trajectory.run()
                segments = [s for o in outputs for s in o.segments if s.num_supervised]
                for segment in segments:
                    begin_scoring(segment)
                for segment in scoring.keys() - set(segments):
                    scoring[segment].cancel()  # a scheduler left it out of its outputs
                # Awaited here, not by the group: before Python 3.13 a task that fails while the
                # group waits leaves its parent marked as cancelled.
                scored = [(segment, await scoring[segment]) for segment in segments]
        if not scored:
            raise HookError("the scheduler's masks leave no token to train on")
        return await self._hand_over(task, trajectory, scored, tally, budget)

    def _trajectory(
        self,
        task: RolloutTask,
        attempt: int,
        tally: Tally,
        budget: InfrastructureBudget,
        on_closed_segment: Callable[[Segment], object],
    ) -> Trajectory:
        sampler = ReplySampler(
            self._student,
            settings=self._settings,
            sample_id=task.sample_id,
            seed=task.seed,
            attempt=attempt,
            clock=self._clock,
            watch=self._student_watch,
            tally=tally,
            budget=budget,
        )
        return Trajectory(
            RolloutRequest.from_row(task.row),
            scheduler=self._scheduler,
            hooks=self._hooks,
            sampler=sampler,
            template=self._template,
            max_turns=self._settings.max_turns,
            max_new_tokens=self._settings.max_new_tokens,
            max_model_len=self._max_model_len,
            on_closed_segment=on_closed_segment,
            counters=self._counters,
        )

    async def _score(
        self, segment: Segment, sample_id: str, tally: Tally, budget: InfrastructureBudget
    ) -> TeacherScores:
        request = score_request(segment, sample_id=sample_id)
        started_s = self._clock.now()
        try:
            return await self._until_served(
                lambda: self._teacher.score(request),
                self._teacher_watch,
                budget,
                num_prompt_tokens=segment.num_tokens,
            )
        finally:
            tally.score_s += self._clock.now() - started_s

    async def _hand_over(
        self,
        task: RolloutTask,
        trajectory: Trajectory,
        scored: Sequence[tuple[Segment, TeacherScores]],
        tally: Tally,
        budget: InfrastructureBudget,
    ) -> SampleMeta:
        payload = await asyncio.to_thread(encode_sample, task.sample_id, scored)
        meta = SampleMeta(
            sample_id=task.sample_id,
            ordinal=task.ordinal,
            due_step=task.due_step,
            segments=tuple(
                SegmentShape(num_tokens=s.num_tokens, num_supervised=s.num_supervised)
                for s, _ in scored
            ),
            oldest_version=min(span.policy_version for s, _ in scored for span in s.spans),
            num_generated_tokens=tally.num_sampled,
            num_wasted_tokens=tally.num_wasted,
            num_bytes=len(payload),
            num_turns=trajectory.num_turns,
            finish_reason=trajectory.finish_reason,
            generate_s=tally.generate_s,
            score_s=tally.score_s,
            missing_logprobs=not all(s.sampler_logprobs for s, _ in scored),
        )
        queue = self._evaluation_queue if task.held_out else self._train_queue
        await self._until_served(
            lambda: queue.put(meta, payload), self._queue_watch, budget, num_prompt_tokens=0
        )
        self._counters["finished"] += 1
        self._counters["missing_logprobs"] += meta.missing_logprobs
        return meta

    async def _until_served(
        self,
        call: Callable[[], Awaitable[T]],
        watch: StageWatch,
        budget: InfrastructureBudget,
        *,
        num_prompt_tokens: int,
    ) -> T:
        while True:
            try:
                with watch.request(num_prompt_tokens=num_prompt_tokens):
                    return await call()
            except InfrastructureError as error:
                await budget.spend(error, watch)

    def _bury(
        self, task: RolloutTask, error: Exception, num_attempts: int, tally: Tally
    ) -> DeadSample:
        self._counters["dead"] += 1
        return DeadSample(
            sample_id=task.sample_id,
            ordinal=task.ordinal,
            prompt_id=task.prompt_id,
            reason=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            num_attempts=num_attempts,
            num_generated_tokens=tally.num_tokens,
        )
