"""One job that everything happens to: what is killed is replaced or named, and no prompt is lost.

The teacher is the student itself and hardly learns, so that every loss of the run shows whether
scores and positions belong together, over the whole path, in trajectories of two turns.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from opdkit.actors.files.run_files import RunDirectory
from opdkit.engine.run_parts import RunState
from tests.integration.command import Place, RunningJob, running
from tests.integration.conftest import prompt_line
from tests.integration.jobs import PROMPTS, micro_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

NUM_STEPS = 28
SAMPLES_PER_STEP = 4
MAX_POLICY_LAG = 2
SOON_S = 20.0
FAULTS = {
    "student": "opdkit.actors.vllm.student_engine:StudentEngine.generate:6",
    "teacher": "opdkit.actors.vllm.teacher_engine:TeacherEngine.score:6",
    "trainer": "opdkit.actors.megatron.session:MegatronSession.train:2",
}
"""By stage: the call that raises an exception which nobody foresaw; see ``faults/``."""


@dataclass
class Story:
    """What each of the runs of the job left."""

    place: Place
    directory: Path
    endings: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    causes: dict[str, str] = field(default_factory=dict[str, str])
    """What the summary names."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """From the fault to the end of the process."""
    leftovers: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    steps_after: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The step records of all runs together."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]


Act = Callable[[Story, str, str], None]
"""Something that happens to the job under a name: from one start of it to its end."""


@pytest.fixture(scope="module")
def story(models: Path, shared_place: Place) -> Story:
    place = shared_place
    values = micro_job(
        "story",
        models,
        num_steps=NUM_STEPS,
        samples_per_step=SAMPLES_PER_STEP,
        max_policy_lag=MAX_POLICY_LAG,
    )
    values["teachers"][0]["model"] = values["student"]["model"]
    values["trainer"]["optimizer"]["lr"] = 1e-12
    values["rollout"] |= {"scheduler": "math_tips", "max_turns": 2}
    # Just as many samples as there are rows: were one trained twice, another would be missing.
    values["data"] |= {"num_epochs": 1}
    num_rows = NUM_STEPS * SAMPLES_PER_STEP
    rows = [prompt_line(PROMPTS[n % len(PROMPTS)], solution="42") for n in range(num_rows)]
    (place.folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    job = place.write_job(values)
    story = Story(place=place, directory=place.folder / "runs" / "story")
    for name, act in ACTS.items():
        act(story, name, job)
    return story


def interrupt_while_it_starts(story: Story, name: str, job: str) -> None:
    with running(story.place, job) as run:
        run.until(lambda record: record["kind"] == "progress")
        _end(story, name, run, lambda: os.killpg(run.process.pid, signal.SIGINT))


def lose_engines_and_be_killed(story: Story, name: str, job: str) -> None:
    with running(story.place, job) as run:
        step = run.until_step(1)
        run.kill("VLLM::EngineCore", under="ServeReplica:story-student")
        step = run.until_step(step + MAX_POLICY_LAG + 2)
        run.kill("ServeReplica:story-teacher")
        run.until_step(step + MAX_POLICY_LAG + 2)
        _end(story, name, run, run.process.kill)


def fail_in(stage: str) -> Act:
    """Return the act of a stage that raises."""

    def act(story: Story, name: str, job: str) -> None:
        with running(story.place, job, fault=FAULTS[stage]) as run:
            _end(story, name, run, lambda: None)

    return act


def lose_the_queue(story: Story, name: str, job: str) -> None:
    _lose(story, name, job, "ray::QueueActor")


def lose_the_coordinator(story: Story, name: str, job: str) -> None:
    _lose(story, name, job, "ray::Coordinator")


def interrupt_in_training(story: Story, name: str, job: str) -> None:
    with running(story.place, job) as run:
        run.until_step(len(story.steps) + 1)
        _end(story, name, run, lambda: os.killpg(run.process.pid, signal.SIGINT))


def terminate_in_training(story: Story, name: str, job: str) -> None:
    with running(story.place, job) as run:
        run.until_step(len(story.steps) + 1)
        _end(story, name, run, run.process.terminate)


def finish(story: Story, name: str, job: str) -> None:
    with running(story.place, job) as run:
        _end(story, name, run, lambda: None)


ACTS: dict[str, Act] = {
    act.__name__: act
    for act in (
        interrupt_while_it_starts,
        lose_engines_and_be_killed,
        lose_the_queue,
        lose_the_coordinator,
        interrupt_in_training,
        terminate_in_training,
    )
} | {f"fail_in_{stage}": fail_in(stage) for stage in FAULTS}
ACTS["finish"] = finish


def _lose(story: Story, name: str, job: str, title: str) -> None:
    with running(story.place, job) as run:
        run.until_step(len(story.steps) + 1)
        _end(story, name, run, lambda: run.kill(title))


def _end(story: Story, name: str, run: RunningJob, fault: Callable[[], object]) -> None:
    started_s = time.monotonic()
    fault()
    story.endings[name] = run.end()
    story.seconds[name] = time.monotonic() - started_s
    story.causes[name] = run.records[-1].get("cause", "")
    story.leftovers[name] = story.place.until_gone(within_s=SOON_S)
    if (story.directory / "metrics.jsonl").exists():
        story.steps_after[name] = [record["step"] for record in story.steps]


@pytest.mark.parametrize(
    "name", ["interrupt_while_it_starts", "interrupt_in_training", "terminate_in_training"]
)
def test_ctrl_c_ends_a_run_soon_and_leaves_nothing(story: Story, name: str) -> None:
    code, errors = story.endings[name]
    assert code == 130
    assert "Traceback" not in errors
    assert story.seconds[name] < SOON_S
    assert story.leftovers[name] == []


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("lose_the_queue", "ReplicaLost: queue"),
        ("lose_the_coordinator", "ReplicaLost: coordinator"),
    ],
)
def test_a_part_that_cannot_be_replaced_ends_the_run_by_name(
    story: Story, name: str, cause: str
) -> None:
    code, errors = story.endings[name]
    assert code == 1
    assert "Traceback" not in errors
    assert story.seconds[name] < SOON_S
    assert story.leftovers[name] == []
    assert cause in story.causes[name]
    assert len(story.causes[name]) < 200


@pytest.mark.parametrize("stage", FAULTS)
def test_an_exception_in_a_stage_ends_the_run_with_its_cause(story: Story, stage: str) -> None:
    code, errors = story.endings[f"fail_in_{stage}"]
    assert code == 1
    assert "Traceback" not in errors
    assert story.leftovers[f"fail_in_{stage}"] == []
    assert "RuntimeError: a fault that a test wants" in story.causes[f"fail_in_{stage}"]


def test_a_run_that_is_killed_leaves_nothing(story: Story) -> None:
    code, _ = story.endings["lose_engines_and_be_killed"]
    assert code == -signal.SIGKILL
    assert story.leftovers["lose_engines_and_be_killed"] == []


def test_engines_that_die_are_replaced_and_cost_no_sample(story: Story) -> None:
    # It went on for longer than there were finished samples in store, twice.
    steps = story.steps_after["lose_engines_and_be_killed"]
    assert len(steps) >= 2 * (MAX_POLICY_LAG + 2)
    assert not (story.directory / "dead_letters.jsonl").exists()


def test_each_prompt_is_trained_on_once_whatever_happened(story: Story) -> None:
    assert story.endings["finish"] == (0, "")
    steps = story.steps
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert sum(step["num_samples"] for step in steps) == NUM_STEPS * SAMPLES_PER_STEP
    checkpoint = RunDirectory(story.directory, keep=2).newest()
    assert checkpoint is not None
    ledger = msgspec.msgpack.decode(checkpoint.state, type=RunState).ledger
    assert (ledger.frontier, ledger.num_trained) == (112, 112)
    assert (ledger.num_dead, ledger.ended_beyond) == (0, ())


def test_samples_are_never_older_than_allowed(story: Story) -> None:
    lags = {step["lag_max"] for step in story.steps}
    assert max(lags) <= MAX_POLICY_LAG
    assert len(lags) > 1


def test_a_student_that_is_its_own_teacher_has_no_loss(story: Story) -> None:
    for step in story.steps:
        assert abs(step["loss"]) < 1e-3
        assert step["sampler_gap"] < 1e-3
        assert step["num_uncovered"] == 0
    assert any(step["turns_mean"] > 1 for step in story.steps)
    trained = sum(step["num_supervised"] for step in story.steps)
    assert trained == sum(
        round(step["generated_tokens_mean"] * step["num_samples"]) for step in story.steps
    )
