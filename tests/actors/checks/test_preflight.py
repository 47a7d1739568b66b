"""What a check says of a job on real files: one row a mistake."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from opdkit.actors.checks.memory_estimates import MIB, Machine, estimate_memory, read_machine
from opdkit.actors.checks.preflight import check_job
from opdkit.actors.checks.preflight_report import Finding, PreflightReport
from opdkit.actors.files.model_files import read_model
from opdkit.actors.hardware import count_gpus
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError
from tests.actors.model_folders import SPECIAL, write_model
from tests.protocols.jobs import job_values

LARGE = Machine(total_bytes=2**40, available_bytes=2**40, has_bfloat16=False)


def _rows(*texts: str) -> str:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return "".join(json.dumps(row) + "\n" for row in rows)


class Job:
    """A job whose models and data are real files that a test may replace."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.values = job_values()
        self.values["student"]["model"] = str(directory / "student")
        self.values["teachers"][0]["model"] = str(directory / "teacher")
        self.values["data"]["train"] = str(directory / "train.jsonl")
        self.data(_rows("hello", "two"))

    def data(self, text: str) -> None:
        """Replace the training data."""
        (self.directory / "train.jsonl").write_text(text)

    def spec(self, *changes: tuple[str, Any]) -> JobSpec:
        """Return the job, changed."""
        return decode_job(apply_overrides(self.values, changes))

    def check(
        self,
        *changes: tuple[str, Any],
        student: dict[str, Any] | None = None,
        teacher: dict[str, Any] | None = None,
        machine: Machine = LARGE,
    ) -> PreflightReport:
        """Write the models that are not there yet, and check."""
        for name, how in (("student", student), ("teacher", teacher)):
            if not (self.directory / name).exists():
                write_model(self.directory / name, **(how or {}))
        return check_job(self.spec(*changes), machine=machine)


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Job:
    """A job that passes its check."""
    return Job(tmp_path)


def _messages(findings: Sequence[Finding]) -> str:
    return "\n".join(finding.message for finding in findings)


def _warnings(report: PreflightReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.level == "warning"]


def test_a_good_job_passes_every_check(job: Job) -> None:
    report = job.check()
    assert not report.errors
    assert not _warnings(report)
    report.require()
    assert {finding.check for finding in report.findings} == {
        "student",
        "teachers[0]",
        "context",
        "tokenizers",
        "end of sequence",
        "logits",
        "support",
        "grid",
        "scheduler",
        "data.train",
        "epochs",
        "memory",
    }


def test_the_report_is_data(job: Job) -> None:
    report = job.check()
    assert msgspec.convert(msgspec.to_builtins(report), PreflightReport) == report


def test_all_mistakes_are_found_at_once(job: Job) -> None:
    report = job.check(
        ("trainer.parallel.tensor", 3),
        ("student.max_model_len", 600),
        ("teachers.0.max_model_len", 601),
        ("data.held_out", "none.jsonl"),
    )
    assert {finding.check for finding in report.errors} == {"grid", "context", "data.held_out"}
    with pytest.raises(ConfigError, match=r"max_model_len is 600.*parallel\.tensor is 3"):
        report.require()


def test_a_missing_model_does_not_hide_bad_data(job: Job) -> None:
    job.data("{\n")
    report = job.check(("student.model", "none"))
    assert [finding.check for finding in report.errors] == ["student", "data.train"]


MODEL_MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another end": (
        {"generation": {"eos_token_id": 256}, "config": {"eos_token_id": 256}},
        {},
        "teachers[0] ends at 258, the student at 256: replies would go on where the teacher ends "
        "them; set rollout.stop_token_ids=[258]",
    ),
    "an end too few": (
        {},
        {"generation": {"eos_token_id": [256, 258]}},
        "teachers[0] ends at 256, 258, the student at 258",
    ),
    "no end": (
        {"generation": {"eos_token_id": None}},
        {"generation": {"eos_token_id": None}},
        "no reply would ever end",
    ),
    "another vocabulary": (
        {},
        {"special": (*SPECIAL, "<think>")},
        "have other vocabulary and added tokens: one tokenizer is needed",
    ),
    "logits too narrow": (
        {"config": {"vocab_size": 200}},
        {},
        "student: vocab_size is 200 in config.json, but the tokenizer has 259 ids",
    ),
}


@pytest.mark.parametrize(
    ("student", "teacher", "message"), MODEL_MISTAKES.values(), ids=MODEL_MISTAKES.keys()
)
def test_models_that_do_not_fit_are_refused(
    job: Job, student: dict[str, Any], teacher: dict[str, Any], message: str
) -> None:
    report = job.check(student=student, teacher=teacher)
    assert message in _messages(report.errors)


def test_a_stop_id_makes_up_for_another_end(job: Job) -> None:
    student = {"generation": {"eos_token_id": 256}}
    report = job.check(("rollout.stop_token_ids", [258]), student=student)
    assert not report.errors


def test_an_end_that_the_teacher_does_not_know_is_a_warning(job: Job) -> None:
    report = job.check(student={"generation": {"eos_token_id": [256, 258]}})
    assert not report.errors
    assert "the teacher does not end replies at 256" in _messages(_warnings(report))


def test_another_padding_id_is_a_warning_that_names_both(job: Job) -> None:
    report = job.check(teacher={"config": {"pad_token_id": 0}})
    assert "pad_token_id is 256 in the student, 0 in teachers[0]" in _messages(_warnings(report))


def test_padded_logits_are_accepted_and_explained(job: Job) -> None:
    report = job.check(teacher={"config": {"vocab_size": 320}})
    assert not report.errors
    assert "259 wide in the student, 320 in the teacher: compared over the 259 ids" in _messages(
        report.findings
    )


FIELD_MISTAKES: dict[str, tuple[list[tuple[str, Any]], str]] = {
    "student context": (
        [("student.max_model_len", 513), ("teachers.0.max_model_len", 514)],
        "student.max_model_len is 513, but must be at most 512, max_position_embeddings",
    ),
    "teacher context": (
        [("teachers.0.max_model_len", 514)],
        "teachers[0].max_model_len is 514, but must be at most 512",
    ),
    "top k above the vocabulary": (
        [("loss.top_k", 260)],
        "loss.top_k is 260, but must be at most 259, the vocabulary",
    ),
    "sampling above the vocabulary": (
        [("rollout.top_k", 260)],
        "rollout.top_k is 260, but must be at most 259",
    ),
    "payload over the budget": (
        [("loss.support", "full"), ("pipeline.queue_mib", 1), ("pipeline.samples_per_step", 64)],
        "pipeline.queue_mib is 1, but a batch of 64 samples with loss.support 'full' over 259 ids "
        "can take 9 MiB",
    ),
    "key-value heads not divided": (
        [("trainer.parallel.tensor", 4)],
        "trainer.parallel.tensor is 4, but must divide the student's num_key_value_heads, 2",
    ),
    "a stop id of another vocabulary": (
        [("rollout.stop_token_ids", [259])],
        "replies are to end at 259, but ids must be in [0, 259)",
    ),
    "data run out": (
        [("data.num_epochs", 2)],
        "data.num_epochs is 2, which gives 4 samples, but pipeline.num_steps times "
        "pipeline.samples_per_step needs 48",
    ),
    "no such scheduler": (
        [("rollout.scheduler", "singel_turn")],
        "rollout.scheduler is 'singel_turn', did you mean 'single_turn'?",
    ),
    "no such option of the scheduler": (
        [("rollout.scheduler_options", {"foo": 1})],
        "rollout.scheduler_options.foo is no option of 'single_turn'",
    ),
    "an option's value of another kind": (
        [("rollout.scheduler", "math_tips"), ("rollout.scheduler_options", {"max_tips": "abc"})],
        "rollout.scheduler_options is {'max_tips': 'abc'}, but 'math_tips' does not take it",
    ),
    "no data": (
        [("data.train", "none.jsonl")],
        "data.train is 'none.jsonl': none.jsonl: No such file or directory",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FIELD_MISTAKES.values(), ids=FIELD_MISTAKES.keys())
def test_a_field_that_does_not_fit_is_refused(
    job: Job, changes: list[tuple[str, Any]], message: str
) -> None:
    assert message in _messages(job.check(*changes).errors)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "train.jsonl:2 is not JSON"),
        ('{"prompt": "x"}\n', "train.jsonl:2 has no 'messages'"),
    ],
)
def test_a_bad_row_costs_the_job_or_only_itself(job: Job, line: str, message: str) -> None:
    job.data(_rows("good") + line + _rows("good"))
    (finding,) = job.check().errors
    assert "1 of 3 rows are no prompts" in finding.message
    assert message in finding.message
    report = job.check(("data.bad_rows", "dead_letter"))
    assert not report.errors
    assert message in _messages(_warnings(report))


def test_data_of_bad_rows_only_is_refused_in_any_case(job: Job) -> None:
    job.data("{\n{\n")
    report = job.check(("data.bad_rows", "dead_letter"))
    assert "2 of 2 rows are no prompts" in _messages(report.errors)


def test_an_empty_file_is_refused(job: Job) -> None:
    job.data("")
    assert "train.jsonl is empty" in _messages(job.check().errors)


def test_prompts_longer_than_the_context_are_counted(job: Job) -> None:
    job.data(_rows("short", "x" * 300))
    (finding,) = job.check().errors
    assert "1 of 2 prompts leave no room in student.max_model_len, 256" in finding.message
    assert "train.jsonl:2 has 319 tokens" in finding.message
    dead_letter = ("data.bad_rows", "dead_letter")
    assert not job.check(dead_letter).errors
    job.data(_rows("x" * 300))
    assert "1 of 1 prompts leave no room" in _messages(job.check(dead_letter).errors)


def test_a_reply_at_the_end_of_a_row_does_not_count(job: Job) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 300}]
    job.data(json.dumps({"messages": messages}) + "\n")
    assert not job.check().errors


def test_prompts_that_cut_replies_short_are_a_warning(job: Job) -> None:
    job.data(_rows("x" * 150))
    assert "1 of 1 prompts leave less than rollout.max_new_tokens, 128" in _messages(
        _warnings(job.check())
    )


def test_a_job_that_does_not_fit_the_machine_is_refused(job: Job) -> None:
    small = msgspec.structs.replace(LARGE, total_bytes=1000 * MIB)
    assert "but this machine has 1.0 GiB" in _messages(job.check(machine=small).errors)
    busy = msgspec.structs.replace(LARGE, available_bytes=1000 * MIB)
    assert "but only 1.0 GiB are free" in _messages(_warnings(job.check(machine=busy)))
    on_cluster = job.check(("cluster.address", "auto"), machine=small)
    assert not on_cluster.errors


def test_estimates_grow_with_what_they_count(job: Job) -> None:
    job.check()
    model = read_model(job.values["student"]["model"], field="student.model")
    model = msgspec.structs.replace(model, num_parameters=10**9)
    few = estimate_memory(job.spec(), model, model, LARGE)
    more = estimate_memory(
        job.spec(("student.replicas", 2), ("teachers.0.kv_cache_mib", 1256)), model, model, LARGE
    )
    half = estimate_memory(
        job.spec(("teachers.0.dtype", "bfloat16"), ("trainer.placement.num_gpus", 1)),
        model,
        model,
        LARGE,
    )
    assert more.student_bytes == 2 * few.student_bytes
    assert more.teacher_bytes - few.teacher_bytes == 1000 * MIB
    assert few.teacher_bytes - half.teacher_bytes == 2 * 10**9
    assert few.trainer_bytes - half.trainer_bytes > 16 * 10**9


def test_this_machine_has_memory() -> None:
    machine = read_machine()
    assert 0 < machine.available_bytes <= machine.total_bytes


def test_gpus_that_are_not_there_are_an_error_that_names_the_fields(job: Job) -> None:
    changes = (
        ("student.placement.num_gpus", 1),
        ("student.replicas", 2),
        ("teachers.0.placement.num_gpus", 0.5),
    )
    (finding,) = job.check(*changes).errors
    assert finding.message == (
        "the job reserves 2.5 GPUs (student.placement.num_gpus 2, teachers[0].placement.num_gpus "
        "0.5, over all its processes), but this machine has 0"
    )
    assert not job.check(*changes, machine=msgspec.structs.replace(LARGE, num_gpus=3)).errors
    assert not job.check(*changes, ("cluster.address", "auto")).errors


def test_gpus_are_counted_in_the_drivers_list_and_among_the_devices(tmp_path: pathlib.Path) -> None:
    driver, devices = tmp_path / "driver", tmp_path / "dev"
    assert count_gpus(driver, devices) == 0
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (driver / "gpus" / address).mkdir(parents=True)
    assert count_gpus(driver, devices) == 2
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (devices / name).write_text("")
    assert count_gpus(driver, devices) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "file' is no folder"),
        ("file/run", "file' is no folder"),
        ("a\0b", "holds a NUL character"),
        ("x" * 300, "cannot be looked at: File name too long"),
    ],
)
def test_a_run_directory_that_cannot_be_made_is_refused(job: Job, name: str, message: str) -> None:
    (job.directory / "file").write_text("")
    (finding,) = job.check(("job.run_dir", str(job.directory / name))).errors
    assert finding.check == "job.run_dir"
    assert message in finding.message
