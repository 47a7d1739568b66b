"""The command as a person and a script meet it."""

import asyncio
import json
import os
import pathlib
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]  # ships no type information

from opdkit.actors.cli import import_function, main
from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError, InfrastructureError, JobFailed
from opdkit.protocols.messages import ProgressRecord
from tests.actors.model_folders import write_model
from tests.actors.reports.test_run_report import SUMMARY
from tests.protocols.jobs import job_values

SOURCE = pathlib.Path(__file__).parents[2] / ".src"
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "tensorboard", "matplotlib")
Fake = Callable[..., Any]


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    """The YAML of a job whose models and data are there."""
    values = job_values()
    for name, section in (("student", values["student"]), ("teacher", values["teachers"][0])):
        section["model"] = str(write_model(tmp_path / name))
    data = tmp_path / "train.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    values["data"]["train"] = str(data)
    # Far below any machine's memory, but above the fixed overheads of the estimate.
    values["cluster"] = {"address": "auto"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _with(name: str, fake: Fake) -> Callable[[str], Fake]:
    """Return a ``load`` that knows one function more."""
    return lambda wanted: fake if wanted == name else import_function(wanted)


def _running(ending: Fake) -> Callable[[str], Fake]:
    def run_job(spec: JobSpec, *, show: Fake) -> object:
        async def records() -> AsyncIterator[ProgressRecord]:
            yield ProgressRecord(phase="training", step=1, num_steps=spec.pipeline.num_steps)

        asyncio.run(show(records()))
        return ending()

    return _with("opdkit.actors.foreground:run", run_job)


def _raising(error: BaseException) -> Fake:
    def raise_error(*_: object, **__: object) -> None:
        raise error

    return raise_error


def _in_new_process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        env={"PYTHONPATH": str(SOURCE), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import opdkit",
        "from opdkit.actors.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from opdkit.actors.cli import main\nassert main(['check', sys.argv[1]]) == 2",
        "from opdkit.actors.cli import main\nassert main(['run', sys.argv[1]]) == 2",
        "from opdkit.actors.cli import main\nassert main(['bench', 'none']) == 2",
    ],
    ids=["import", "help", "check", "run", "bench"],
)
def test_a_mistake_is_answered_without_anything_heavy(tmp_path: pathlib.Path, code: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1\n")
    probe = (
        f"import sys\n{code}\nprint([m for m in {(*HEAVY, 'numpy', 'rich')} if m in sys.modules])"
    )
    process = _in_new_process("-c", probe, str(path))
    assert process.stdout.splitlines()[-1] == "[]", process.stderr


def test_a_whole_check_needs_nothing_heavy(config: pathlib.Path) -> None:
    probe = (
        "import sys\nfrom opdkit.actors.cli import main\nassert main(['check', sys.argv[1]]) == 0\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    process = _in_new_process("-c", probe, str(config))
    assert process.stdout.splitlines()[-1] == "[]", process.stderr


def test_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in ("exit codes:", "130  interrupted", "run a job here", "NO_COLOR"):
        assert part in text


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run"], ["check", "a", "--nope"], ["prepare", "gpt5"]], ids=str
)
def test_a_wrong_command_line_ends_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_good_job_is_checked_line_by_line(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok      student: llama, 0.0 M parameters")
    assert lines[-1] == "The job can run, with no warnings."


def test_overrides_may_stand_before_and_behind_options(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check", str(config), "loss.top_k=8", "--json", "trainer.parallel.tensor=3"]
    assert main(argv) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {f["check"] for f in report["findings"] if f["level"] == "error"} == {"grid"}


def test_a_bad_file_is_one_line_on_stderr_and_an_object_for_programs(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: [1\n")
    assert main(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"opdkit: error: {path}:2: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert main(["check", str(path), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kind"], answer["error"]) == ("error", "ConfigError")


def test_a_run_shows_progress_and_its_summary(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["run", str(config), "pipeline.num_steps=7"], load=_running(lambda: SUMMARY))
    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("training 1/7  queue 0\n")
    assert "tiny completed after 30 steps" in out


def test_a_run_for_programs_writes_one_object_a_line(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(config), "--json"], load=_running(lambda: SUMMARY)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["check", "progress", "summary"]
    assert lines[2]["status"] == "completed"


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        (_raising(ConfigError("x is 1")), 2, "opdkit: error: x is 1\n"),
        (_raising(InfrastructureError("gone")), 1, "opdkit: error: gone\n"),
        (_raising(KeyboardInterrupt()), 130, "opdkit: interrupted\n"),
        (lambda: msgspec.structs.replace(SUMMARY, status="failed", cause="oom"), 1, ""),
        (lambda: msgspec.structs.replace(SUMMARY, status="cancelled"), 130, ""),
    ],
    ids=["configuration", "infrastructure", "interrupt", "failed", "cancelled"],
)
def test_how_a_run_ends_is_its_exit_code(
    config: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    ending: Fake,
    code: int,
    message: str,
) -> None:
    assert main(["run", str(config)], load=_running(ending)) == code
    assert capsys.readouterr().err == message


def test_a_cause_is_named_in_the_same_line(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = JobFailed("the trainer\nended")
    failure.__cause__ = MemoryError("rank 0")
    assert main(["run", str(config)], load=_running(_raising(failure))) == 1
    assert capsys.readouterr().err == "opdkit: error: the trainer ended: MemoryError: rank 0\n"


def test_an_error_of_our_own_making_is_not_hidden(config: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError):
        main(["run", str(config)], load=_running(_raising(ZeroDivisionError())))


def test_a_job_with_errors_is_not_started(
    config: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = _running(_raising(AssertionError("was started")))
    assert main(["run", str(config), "trainer.parallel.tensor=3"], load=load) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error   grid: trainer.parallel.tensor is 3, but must divide")
    assert captured.err.endswith("The job cannot run: 3 errors.\n")


def test_prepare_makes_the_models_asked_for(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare_micro(directory: pathlib.Path, *, report: Callable[[str], None]) -> None:
        report(f"{directory.name}: ready")

    load = _with("opdkit.actors.models.commands:prepare_micro", prepare_micro)
    assert main(["prepare", "micro", "--dir", str(tmp_path / "models")], load=load) == 0
    assert capsys.readouterr().out == "models: ready\n"


def test_export_names_the_run_and_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, str]] = []

    def export_run(run: pathlib.Path, directory: pathlib.Path) -> None:
        seen.append((str(run), str(directory)))

    load = _with("opdkit.actors.exporting:export_run", export_run)
    assert main(["export", "runs/tiny", "out"], load=load) == 0
    assert seen == [("runs/tiny", "out")]


def test_every_command_is_implemented() -> None:
    for name in ("run", "check", "prepare", "export", "bench"):
        assert callable(import_function(f"opdkit.actors.commands:{name}"))


@pytest.mark.parametrize(("environment", "is_coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(
    tmp_path: pathlib.Path, environment: dict[str, str], is_coloured: bool
) -> None:
    reader, writer = pty.openpty()
    with os.fdopen(reader, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "opdkit.actors.cli", "check", str(tmp_path / "none.yaml")],
            env={"PYTHONPATH": str(SOURCE), "TERM": "xterm", **environment},
            stdout=writer,
            stderr=writer,
        )
        os.close(writer)
        assert process.wait() == 2
        text = terminal.read(4096)
    assert (b"\x1b[" in text) is is_coloured
    assert b"error:" in text


def test_a_reader_that_leaves_early_is_no_error(config: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "opdkit.actors.cli", "check", str(config)],
        env={"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
