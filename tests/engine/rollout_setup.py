"""A rollout runner made of scripted parts, and the cases' notation."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opdkit.engine.rollouts import Rollouts
from opdkit.engine.scheduling import RolloutOutput, RolloutRequest, Scheduler
from opdkit.engine.testing import (
    LetterTemplate,
    LoopClock,
    RecordingQueue,
    ScriptedReply,
    ScriptedStudent,
    ScriptedTeacher,
    VirtualTimeLoop,
    parse_reply,
)
from opdkit.protocols.config import RolloutSection
from opdkit.protocols.ids import Ordinal
from opdkit.protocols.messages import (
    DeadSample,
    RolloutOutcome,
    RolloutTask,
    RolloutWorkerReport,
    SampleMeta,
    Segment,
)
from tests.conftest import Run

QUESTION = {"role": "user", "content": "q"}
Turns = list[list[int]]


def make_task(sample_id: str = "s0", *, held_out: bool = False, **row: Any) -> RolloutTask:
    columns: dict[str, Any] = {"messages": [QUESTION], **row}
    return RolloutTask(
        sample_id=sample_id,
        ordinal=Ordinal(0),
        due_step=3,
        prompt_id="train.jsonl:1",
        row=columns,
        seed=7,
        held_out=held_out,
    )


class KeepsOutputs(Scheduler):
    """Remembers how its trajectories ended."""

    def __init__(self) -> None:
        self.outputs: list[RolloutOutput] = []
        self.errors: list[BaseException] = []

    async def on_trajectory_end(
        self, output: RolloutOutput | Sequence[RolloutOutput], error: BaseException | None
    ) -> None:
        """Keep what there is."""
        if error is not None:
            self.errors.append(error)
        elif isinstance(output, RolloutOutput):
            self.outputs.append(output)


class GoesOn(KeepsOutputs):
    """Continues as a test says, until the job's max_turns."""

    def __init__(self, *steps: Mapping[str, Any], message: str | None = None) -> None:
        super().__init__()
        self.steps = steps
        self.message = message
        self.num_steps = 0

    async def step(self, request: RolloutRequest, choice: object, turn: int) -> Mapping[str, Any]:
        """Add the user's message, and return this turn's part of the script."""
        self.num_steps += 1
        if self.message is not None:
            request.messages.append({"role": "user", "content": self.message})
        scripted = self.steps[turn - 1 : turn]
        return {"infer_request": request, **(scripted[0] if scripted else {})}


class Compresses(GoesOn):
    """Forgets the conversation after every turn."""

    async def step(self, request: RolloutRequest, choice: object, turn: int) -> Mapping[str, Any]:
        """Start over, in another request that brings nothing along."""
        summary = {"role": "user", "content": f"after {turn}"}
        return {"infer_request": RolloutRequest(messages=[summary])}


class Setup:
    """The parts, and the runner over them."""

    def __init__(
        self,
        replies: Sequence[str | ScriptedReply],
        scheduler: Scheduler,
        *,
        max_turns: int = 8,
        max_model_len: int = 256,
        by_session: Mapping[str, Sequence[ScriptedReply]] | None = None,
        template: LetterTemplate | None = None,
        teacher: ScriptedTeacher | None = None,
        train_queue: RecordingQueue | None = None,
        **settings: Any,
    ) -> None:
        script = [parse_reply(r) if isinstance(r, str) else r for r in replies]
        scripts = [script, *(by_session.values() if by_session else ())]
        everything = [reply for part in scripts for reply in part]
        spellings = {reply.token_ids: reply.text for reply in everything if reply.text}
        self.student = ScriptedStudent(script, by_session=by_session)
        self.teacher = teacher or ScriptedTeacher()
        self.train_queue = train_queue or RecordingQueue()
        self.evaluation_queue = RecordingQueue()
        self.template = template or LetterTemplate(spellings)
        self.rollouts = Rollouts(
            student=self.student,
            teacher=self.teacher,
            template=self.template,
            train_queue=self.train_queue,
            evaluation_queue=self.evaluation_queue,
            scheduler=scheduler,
            settings=msgspec.structs.replace(
                RolloutSection(max_turns=max_turns, max_attempts=1), **settings
            ),
            max_model_len=max_model_len,
            clock=LoopClock(),
            first_retry_delay_s=0.0,
        )

    @property
    def num_open(self) -> int:
        """Calls that the student and the teacher still work on."""
        return self.student.num_open + self.teacher.num_open + self.train_queue.num_waiting

    def segments(self) -> list[Segment]:
        """All segments queued for training."""
        return [part.segment for sample in self.train_queue.samples for part in sample.segments]


def ids_of(segment: Segment) -> list[int]:
    return memoryview(segment.token_ids).cast("i").tolist()


def sampled_ids(segment: Segment) -> list[int]:
    """The tokens with mask 1."""
    return [i for i, m in zip(ids_of(segment), segment.loss_mask, strict=True) if m]


def run_one(run: Run, setup: Setup, *, held_out: bool = False, **row: Any) -> RolloutOutcome:
    outcome = run(setup.rollouts.run(make_task(held_out=held_out, **row)))
    assert isinstance(outcome, SampleMeta | DeadSample)
    assert setup.num_open == 0
    return outcome


def counters(run: Run, setup: Setup) -> dict[str, int]:
    report = run(setup.rollouts.report())
    assert isinstance(report, RolloutWorkerReport)
    assert report.num_in_flight_tokens == 0
    return report.counters


def in_virtual_time(setup: Setup) -> RolloutOutcome:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        outcome = runner.run(setup.rollouts.run(make_task()))
    assert setup.num_open == 0
    return outcome
