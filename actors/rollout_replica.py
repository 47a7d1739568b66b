# pyright: basic
"""Rollout workers: a Serve deployment whose replicas run hundreds of trajectories each.

``RolloutReplica`` is what runs there; ``ServeRollouts`` is the ``RolloutRunner`` that the
coordinator holds. A worker that dies takes its trajectories along: the run starts them again under
the same sample ids, so that none is queued twice.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from opdkit.actors.calls import call
from opdkit.actors.chat_template import TokenizerTemplate
from opdkit.actors.engines import ServeStudent, ServeTeacher
from opdkit.actors.queue_actor import EVALUATION, TRAINING, RemoteQueue
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.rollouts import Rollouts
from opdkit.engine.scheduling import make_scheduler
from opdkit.protocols.config import DeadlineSection, JobSpec
from opdkit.protocols.messages import (
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    StageMeter,
)


class RolloutReplica:
    """One rollout worker."""

    def __init__(self, spec: bytes, queue_actor: Any) -> None:
        job = msgspec.json.decode(spec, type=JobSpec)
        rollout = job.rollout
        self._rollouts = Rollouts(
            student=ServeStudent(job),
            teacher=ServeTeacher(job),
            template=TokenizerTemplate(job.student.model),
            train_queue=RemoteQueue(queue_actor, TRAINING, deadlines=job.deadlines),
            evaluation_queue=RemoteQueue(queue_actor, EVALUATION, deadlines=job.deadlines),
            settings=rollout,
            max_model_len=job.student.max_model_len,
            clock=MonotonicClock(),
            scheduler=make_scheduler(rollout.scheduler, rollout.scheduler_options),
        )

    async def run(self, task: bytes) -> bytes:
        """Run a msgpack ``RolloutTask``; return the msgpack ``RolloutOutcome``."""
        outcome = await self._rollouts.run(msgspec.msgpack.decode(task, type=RolloutTask))
        return msgspec.msgpack.encode(outcome)

    async def report(self) -> bytes:
        """Return the msgpack ``RolloutWorkerReport``."""
        return msgspec.msgpack.encode(await self._rollouts.report())


class ServeRollouts:
    """All rollout workers, as one ``RolloutRunner``."""

    def __init__(self, handle: Any, *, deadlines: DeadlineSection, max_turns: int) -> None:
        self._handle = handle
        self._deadlines = deadlines
        # A trajectory's own parts have deadlines; this one is for a worker that hangs.
        self._trajectory_s = max_turns * deadlines.generate_s + deadlines.score_s + deadlines.step_s

    async def run(self, task: RolloutTask) -> RolloutOutcome:
        """See ``RolloutRunner.run``."""
        encoded = msgspec.msgpack.encode(task)
        reply = await call(
            lambda: self._handle.run.remote(encoded),
            name=f"rollout of {task.sample_id}",
            deadline_s=self._trajectory_s,
        )
        return msgspec.msgpack.decode(reply, type=RolloutOutcome)

    async def report(self) -> RolloutWorkerReport:
        """See ``RolloutRunner.report``. A worker that is just being replaced is left out."""
        replies = await self._handle.broadcast("report").results_async(
            timeout_s=self._deadlines.control_s, return_exceptions=True
        )
        return summed(
            msgspec.msgpack.decode(reply, type=RolloutWorkerReport)
            for reply in replies
            if isinstance(reply, bytes)
        )


def summed(reports: Iterable[RolloutWorkerReport]) -> RolloutWorkerReport:
    """Add up the counters of several workers; the loop lag is that of the worst."""
    student = teacher = StageMeter()
    num_in_flight_tokens = 0
    lag_s = 0.0
    counters: Counter[str] = Counter()
    for report in reports:
        student = _added(student, report.student)
        teacher = _added(teacher, report.teacher)
        num_in_flight_tokens += report.num_in_flight_tokens
        lag_s = max(lag_s, report.loop_lag_p99_s)
        counters.update(report.counters)
    return RolloutWorkerReport(
        student=student,
        teacher=teacher,
        num_in_flight_tokens=num_in_flight_tokens,
        loop_lag_p99_s=lag_s,
        counters=dict(counters),
    )


def _added(one: StageMeter, other: StageMeter) -> StageMeter:
    fields = StageMeter.__struct_fields__
    return StageMeter(**{name: getattr(one, name) + getattr(other, name) for name in fields})
