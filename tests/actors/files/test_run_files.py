"""The run directory: checkpoints, resuming, what a crash leaves, and one run at a time."""

import asyncio
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from opdkit.actors.files.config_file import parse_yaml
from opdkit.actors.files.run_files import RunDirectory
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    DeadSample,
    EvaluationReport,
    StepPlan,
    StepReport,
    WeightManifest,
)
from opdkit.protocols.roles import PolicyTrainer, RunStore
from tests.conftest import Run
from tests.protocols.jobs import job_values


class FileTrainer:
    """Saves its content as a file; may wait for ever in between."""

    def __init__(self, content: str = "weights", *, hangs: bool = False) -> None:
        self.content = content
        self.hangs = hangs
        self.began = asyncio.Event()

    async def save(self, path: str) -> None:
        """Write one file, then wait if told to."""
        await asyncio.to_thread(self._write, pathlib.Path(path))
        self.began.set()
        if self.hangs:
            await asyncio.Event().wait()

    def _write(self, path: pathlib.Path) -> None:
        path.mkdir()
        (path / "rank-0.bin").write_text(self.content)

    async def load(self, path: str) -> None:
        """Read what was saved."""
        self.content = await asyncio.to_thread((pathlib.Path(path) / "rank-0.bin").read_text)

    async def prefetch(self, plan: StepPlan) -> None:
        """Not used here."""
        raise NotImplementedError

    async def train(self, plan: StepPlan) -> StepReport:
        """Not used here."""
        raise NotImplementedError

    async def evaluate(self, plan: StepPlan) -> EvaluationReport:
        """Not used here."""
        raise NotImplementedError

    async def export(self, policy_version: PolicyVersion) -> WeightManifest:
        """Not used here."""
        raise NotImplementedError


def _dead(sample_id: str) -> DeadSample:
    return DeadSample(
        sample_id=sample_id,
        ordinal=Ordinal(0),
        prompt_id="train.jsonl:1",
        reason="HookError",
        message="no",
        traceback="",
        num_attempts=3,
        num_generated_tokens=5,
    )


@pytest.fixture
def values(tmp_path: pathlib.Path) -> dict[str, Any]:
    """Plain values of a job whose data and run directory are in ``tmp_path``."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    result = job_values()
    result["job"]["run_dir"] = str(tmp_path / "run")
    result["data"]["train"] = str(data)
    return result


def _spec(values: dict[str, Any], **changes: Any) -> JobSpec:
    dotted = [(path.replace("__", "."), value) for path, value in changes.items()]
    return decode_job(apply_overrides(values, dotted))


def _save(run: Run, directory: RunStore, step: int, trainer: PolicyTrainer | None = None) -> None:
    run(directory.save(step, f"state {step}".encode(), trainer or FileTrainer(f"weights {step}")))


def _steps(directory: RunDirectory) -> list[str]:
    return sorted(path.name for path in directory.checkpoints.iterdir())


def test_a_new_run_has_nothing_to_resume_and_keeps_its_job(values: dict[str, Any]) -> None:
    spec = _spec(values)
    with RunDirectory.open(spec) as directory:
        assert directory.resumed is None
        text = (directory.path / "job.yaml").read_text()
    assert decode_job(parse_yaml(text, name="job.yaml")) == spec


def test_a_run_resumes_from_its_newest_checkpoint(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
        _save(run, directory, 20)
    with RunDirectory.open(_spec(values)) as directory:
        assert directory.resumed is not None
        assert directory.resumed.step == 20
        assert directory.resumed.state == b"state 20"
        trainer = FileTrainer()
        run(trainer.load(directory.resumed.trainer_path))
        assert trainer.content == "weights 20"


def test_only_so_many_checkpoints_are_kept(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values, checkpoint__keep=2)) as directory:
        for step in (9, 999_999, 1_000_000):
            _save(run, directory, step)
        assert _steps(directory) == ["step-1000000", "step-999999"]
        newest = directory.newest()
        assert newest is not None
        assert newest.step == 1_000_000


def test_a_cancelled_save_leaves_the_last_checkpoint(run: Run, values: dict[str, Any]) -> None:
    async def cancel_in_the_middle(directory: RunDirectory) -> None:
        async with asyncio.TaskGroup() as group:
            trainer = FileTrainer(hangs=True)
            task = group.create_task(directory.save(20, b"new", trainer))
            await trainer.began.wait()
            task.cancel()

    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
        run(cancel_in_the_middle(directory))
        newest = directory.newest()
        assert newest is not None
        assert newest.step == 10
        _save(run, directory, 20)
        assert _steps(directory) == ["step-000010", "step-000020"]


def test_a_checkpoint_that_only_lacked_its_name_is_adopted(
    run: Run, values: dict[str, Any]
) -> None:
    with RunDirectory.open(_spec(values, checkpoint__keep=1)) as directory:
        _save(run, directory, 10)
        checkpoints = directory.checkpoints
        (checkpoints / "step-000010").rename(checkpoints / ".partial-step-000010")
    with RunDirectory.open(_spec(values)) as directory:
        assert directory.resumed is not None
        assert directory.resumed.state == b"state 10"


def test_what_a_crash_left_half_written_is_removed(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
        (directory.checkpoints / ".partial-step-000020" / "trainer").mkdir(parents=True)
    with RunDirectory.open(_spec(values)) as directory:
        assert _steps(directory) == ["step-000010"]


def _without_seal(path: pathlib.Path) -> None:
    (path / "COMPLETE").unlink()


def _with_torn_seal(path: pathlib.Path) -> None:
    (path / "COMPLETE").write_bytes(b"{")


def _without_a_file(path: pathlib.Path) -> None:
    (path / "trainer" / "rank-0.bin").unlink()


def _with_a_file_cut(path: pathlib.Path) -> None:
    (path / "trainer" / "rank-0.bin").write_bytes(b"cut")


@pytest.mark.parametrize(
    "damage", [_without_seal, _with_torn_seal, _without_a_file, _with_a_file_cut]
)
def test_a_damaged_checkpoint_is_passed_over_and_can_be_written_again(
    run: Run, values: dict[str, Any], damage: Callable[[pathlib.Path], None]
) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
        _save(run, directory, 20)
        damage(directory.checkpoints / "step-000020")
    with RunDirectory.open(_spec(values)) as directory:
        assert directory.resumed is not None
        assert directory.resumed.step == 10
        _save(run, directory, 20)
        newest = directory.newest()
        assert newest is not None
        assert newest.step == 20


@pytest.mark.parametrize("damage", [_with_torn_seal, _without_a_file, _with_a_file_cut])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    run: Run, values: dict[str, Any], damage: Callable[[pathlib.Path], None]
) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        run(directory.bury(_dead("a")))
        _save(run, directory, 10)
        damage(directory.checkpoints / "step-000010")
    with pytest.raises(ConfigError) as caught:
        RunDirectory.open(_spec(values)).__enter__()
    assert f"step-000010 in {str(directory.checkpoints)!r}" in str(caught.value)
    assert "remove the folder to begin anew, or choose another job.run_dir" in str(caught.value)
    assert directory.dead_letters.stat().st_size > 0


@pytest.mark.parametrize("name", [".partial-step-000010", "step-000010"])
def test_a_run_killed_in_its_first_save_begins_anew(values: dict[str, Any], name: str) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        (directory.checkpoints / name / "trainer").mkdir(parents=True)
    with RunDirectory.open(_spec(values)) as directory:
        assert directory.resumed is None


def test_a_damaged_checkpoint_takes_no_place_of_a_complete_one(
    run: Run, values: dict[str, Any]
) -> None:
    with RunDirectory.open(_spec(values, checkpoint__keep=2)) as directory:
        for step in (20, 30):
            _save(run, directory, step)
        for step in (20, 30):
            _with_a_file_cut(directory.checkpoints / f"step-{step:06d}")
        _save(run, directory, 10)
        assert _steps(directory) == ["step-000010", "step-000020", "step-000030"]
        for step in (25, 40):
            _save(run, directory, step)
        assert _steps(directory) == ["step-000025", "step-000040"]


@pytest.mark.parametrize(
    "name", ["step-000020-copy2", "step-000020.1", "step-99", "step-x", "step-٠٠٠٠٢٠"]
)
def test_a_folder_of_another_name_is_no_checkpoint_and_stays(
    run: Run, values: dict[str, Any], name: str
) -> None:
    with RunDirectory.open(_spec(values, checkpoint__keep=1)) as directory:
        _save(run, directory, 20)
        (directory.checkpoints / "step-000020").rename(directory.checkpoints / name)
        _save(run, directory, 10)
        assert _steps(directory) == sorted([name, "step-000010"])
        newest = directory.newest()
        assert newest is not None
        assert newest.step == 10


def test_dead_letters_after_the_checkpoint_are_cut(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        run(directory.bury(_dead("a")))
        _save(run, directory, 10)
        run(directory.bury(_dead("b")))
        assert len(directory.dead_letters.read_bytes().splitlines()) == 2
    with RunDirectory.open(_spec(values)) as directory:
        lines = directory.dead_letters.read_bytes().splitlines()
        assert [msgspec.json.decode(line, type=DeadSample) for line in lines] == [_dead("a")]


def test_a_run_without_a_checkpoint_begins_anew(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        run(directory.bury(_dead("a")))
    with RunDirectory.open(_spec(values, job__seed=7)) as directory:
        assert directory.resumed is None
        assert directory.dead_letters.read_bytes() == b""


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("student.model", "other", "student.model is 'other', but this run began with 'student'"),
        ("job.seed", 7, "job.seed is 7, but this run began with 0"),
        ("loss.support", "full", "loss.support is 'full', but this run began with 'top_k'"),
        ("teachers.0.model", "u", "teachers[0].model is 'u', but this run began with 'teacher'"),
        ("rollout.scheduler_options", {"a": 1}, "rollout.scheduler_options"),
        ("trainer.parallel.tensor", 2, "trainer.parallel.tensor is 2, but this run began with 1"),
        ("trainer.optimizer.lr", 1.0, "trainer.optimizer.lr is 1.0, but this run began with"),
    ],
)
def test_a_run_is_not_resumed_as_another(
    run: Run, values: dict[str, Any], path: str, value: object, message: str
) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
    changed = decode_job(apply_overrides(values, [(path, value)]))
    with pytest.raises(ConfigError) as caught, RunDirectory.open(changed):
        pass
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pipeline.num_steps", 100),
        ("logging.tensorboard", False),
        ("checkpoint.every_steps", 1),
        ("student.replicas", 2),
        ("teachers.0.kv_cache_mib", 512),
        ("trainer.parallel.data", 2),
        ("deadlines.step_s", 1),
    ],
)
def test_a_run_is_resumed_with_a_harmless_change(
    run: Run, values: dict[str, Any], path: str, value: object
) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
    with RunDirectory.open(decode_job(apply_overrides(values, [(path, value)]))) as directory:
        assert directory.resumed is not None


def test_a_run_is_not_resumed_on_other_data(run: Run, values: dict[str, Any]) -> None:
    with RunDirectory.open(_spec(values)) as directory:
        _save(run, directory, 10)
    with pathlib.Path(values["data"]["train"]).open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "y"}]}\n')
    with pytest.raises(ConfigError, match=r"data\.train .* content is not what this run began"):
        RunDirectory.open(_spec(values)).__enter__()


HOLDER = """
import sys
from opdkit.actors.files.config_file import parse_yaml
from opdkit.actors.files.run_files import RunDirectory
from opdkit.protocols.config_decoding import decode_job

with RunDirectory.open(decode_job(parse_yaml(sys.argv[1], name="job"))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_cannot_share_a_directory(values: dict[str, Any]) -> None:
    source = pathlib.Path(__file__).parents[3] / ".src"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, json.dumps(values)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(source)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} uses it"):
            RunDirectory.open(_spec(values)).__enter__()
        holder.kill()
    with RunDirectory.open(_spec(values)) as directory:
        assert directory.resumed is None


def test_a_directory_that_cannot_be_made_is_named(
    values: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    spec = _spec(values, job__run_dir=str(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match=r"job\.run_dir is '.*/file/run', but cannot be written"):
        RunDirectory.open(spec).__enter__()
