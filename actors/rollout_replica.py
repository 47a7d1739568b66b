# pyright: basic
"""Rollout workers: a Serve deployment whose replicas run hundreds of trajectories each.

``RolloutReplica`` is what runs there; ``ServeRollouts`` is the ``RolloutRunner`` that the
coordinator holds. A worker that dies takes its trajectories along: the run starts them again under
the same sample ids, so that none is queued twice.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from opdkit.actors.call_deadlines import trajectory_deadline_s
from opdkit.actors.calls import call
from opdkit.actors.chat_template import TokenizerTemplate
from opdkit.actors.engines import ServeStudent, ServeTeacher
from opdkit.actors.files.model_files import read_model
from opdkit.actors.queue_actor import EVALUATION, TRAINING, RemoteQueue
from opdkit.actors.serving import STUDENT, TEACHER, Part, handle_of
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.rollouts import Rollouts
from opdkit.engine.scheduling import make_scheduler
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import (
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    StageMeter,
)
from opdkit.protocols.roles import ChatTemplate

ROLLOUTS = "rollouts"


class RolloutReplica:
    """One rollout worker; wrapped with ``serve.deployment`` in ``actors.serving``."""

    async def __init__(self, spec: bytes, *, queue_actor: Any) -> None:  # type: ignore[misc] # by Serve
        job = msgspec.json.decode(spec, type=JobSpec)
        deadlines = job.deadlines
        template = await asyncio.to_thread(_template, job.student.model)
        student, teacher = [await handle_of(job.job.name, role) for role in (STUDENT, TEACHER)]
        self._rollouts = Rollouts(
            student=ServeStudent(
                student, generate_s=deadlines.generate_s, control_s=deadlines.control_s
            ),
            teacher=ServeTeacher(teacher, score_s=deadlines.score_s, control_s=deadlines.control_s),
            template=template,
            train_queue=RemoteQueue(queue_actor, TRAINING, spec=job),
            evaluation_queue=RemoteQueue(queue_actor, EVALUATION, spec=job),
            scheduler=make_scheduler(job.rollout.scheduler, job.rollout.scheduler_options),
            settings=job.rollout,
            max_model_len=job.student.max_model_len,
            clock=MonotonicClock(),
        )

    async def run(self, task: bytes) -> bytes:
        """Run a msgpack ``RolloutTask``; return the msgpack ``RolloutOutcome``."""
        outcome = await self._rollouts.run(msgspec.msgpack.decode(task, type=RolloutTask))
        return msgspec.msgpack.encode(outcome)

    async def report(self) -> bytes:
        """Return the msgpack ``RolloutWorkerReport``."""
        return msgspec.msgpack.encode(await self._rollouts.report())

    async def check_health(self) -> None:
        """Answer: the event loop lives."""


def _template(model: str) -> ChatTemplate:
    return TokenizerTemplate(read_model(model, field="student.model"), field="student.model")


def rollout_part(spec: JobSpec, *, queue_actor: Any) -> Part:
    """Describe the rollout workers' application."""
    return Part(
        role=ROLLOUTS,
        replica_class=RolloutReplica,
        arguments={"spec": msgspec.json.encode(spec), "queue_actor": queue_actor},
        num_replicas=spec.rollout.workers,
        placement=spec.rollout.placement,
        # Every slot, every held-out prompt, and the reports.
        max_ongoing_requests=spec.pipeline.slots + spec.evaluation.max_prompts + 16,
        environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


class ServeRollouts:
    """All rollout workers, as one ``RolloutRunner``."""

    def __init__(self, handle: Any, *, spec: JobSpec) -> None:
        self._handle = handle
        self._control_s = spec.deadlines.control_s
        # A trajectory's own parts have deadlines; this one is for a worker that hangs.
        self._trajectory_s = trajectory_deadline_s(spec)

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
        replies = await call(
            lambda: self._handle.broadcast("report").results_async(return_exceptions=True),
            name="rollouts.report",
            deadline_s=self._control_s,
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
