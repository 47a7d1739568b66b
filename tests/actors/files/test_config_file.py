"""Reading a job's YAML: values, overrides and mistakes with their lines."""

import pathlib
from typing import Any

import pytest

from opdkit.actors.files.config_file import format_job, parse_override, parse_yaml, read_job
from opdkit.protocols.config_decoding import decode_job
from opdkit.protocols.errors import ConfigError

JOB = """\
job: {name: tiny}
student: {model: student, max_model_len: 256}
teachers:
  - {model: teacher, max_model_len: 257}
data: {train: train.jsonl}
pipeline: {num_steps: 3}
trainer:
  optimizer:
    lr: 1e-4
"""


def _write(directory: pathlib.Path, text: str) -> pathlib.Path:
    path = directory / "job.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_into_a_job(tmp_path: pathlib.Path) -> None:
    spec = read_job(_write(tmp_path, JOB))
    assert spec.job.name == "tiny"
    assert spec.teachers[0].max_model_len == 257


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", "+1e-4", ".1e-3", "0.0001"])
def test_an_exponent_makes_a_number(text: str) -> None:
    assert parse_yaml(text, name="x") == 1e-4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipeline.num_steps=5", ("pipeline.num_steps", 5)),
        ("trainer.optimizer.lr=3e-5", ("trainer.optimizer.lr", 3e-5)),
        ("data.shuffle=false", ("data.shuffle", False)),
        ("data.held_out=null", ("data.held_out", None)),
        ("data.held_out=", ("data.held_out", None)),
        ("rollout.stop_token_ids=[1, 2]", ("rollout.stop_token_ids", [1, 2])),
        ("student.model=a=b", ("student.model", "a=b")),
        ("teachers.0.model=x", ("teachers.0.model", "x")),
        ("rollout.scheduler_options={tip: 'try again'}", None),
    ],
)
def test_the_value_of_an_override_is_yaml(text: str, expected: tuple[str, Any] | None) -> None:
    assert parse_override(text) == (expected or ("rollout.scheduler_options", {"tip": "try again"}))


@pytest.mark.parametrize("text", ["num_steps", "=3", "a..b=3", ".a=3", "a.=3", "a b .c=1"])
def test_an_override_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        parse_override(text)


@pytest.mark.parametrize("value", ["{a: 2020-13-01}", "!!int abc", "&j [*j]", "[" * 3000])
def test_an_override_whose_value_is_broken_is_named(value: str) -> None:
    text = f"rollout.scheduler_options={value}"
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert str(caught.value).startswith(f"override {text!r}")
    assert "\n" not in str(caught.value)


def test_later_overrides_win(tmp_path: pathlib.Path) -> None:
    overrides = ["pipeline.num_steps=5", "pipeline.num_steps=7"]
    assert read_job(_write(tmp_path, JOB), overrides=overrides).pipeline.num_steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", "job.yaml:2: "),
        ("a: 1\n b: 2\n", "job.yaml:2: "),
        ("a:\n\t- 1\n", "job.yaml:2: "),
        ("a: 1\nb: 2\na: 3\n", "job.yaml:3: key 'a' stands here and in line 1"),
        ("s:\n  x: 1\n  x: 2\n", "job.yaml:3: key 'x' stands here and in line 2"),
        ("a: !!python/object:os.system {}\n", "job.yaml:1: "),
        ("a: *nothing\n", "job.yaml:1: "),
        ("", "job.yaml is empty"),
        ("- 1\n", "job.yaml holds a list"),
        ("a: 1\n---\nb: 1\n", "job.yaml:2: "),
        ("a: \x00\n", "job.yaml: "),
        ("a: 1\njob: {name: 2024-13-45}\n", "job.yaml:2: '2024-13-45' is no timestamp"),
        ("seed: 0b_\n", "job.yaml:1: '0b_' is no int"),
        ("seed: !!int abc\n", "job.yaml:1: 'abc' is no int"),
        ("seed: !!int ''\n", "job.yaml:1: '' is no int"),
        ("seed: !!bool abc\n", "job.yaml:1: 'abc' is no bool"),
        ("name: !!timestamp foo\n", "job.yaml:1: 'foo' is no timestamp"),
        ("job: !!map abc\n", "job.yaml:1: expected a mapping node"),
        ("job: !!map [a, b]\n", "job.yaml:1: expected a mapping node"),
        ("job: &j {extra: *j}\n", "job.yaml:1: found unconstructable recursive node"),
        ("a: " + "[" * 3000 + "]" * 3000, "job.yaml is nested too deeply"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(
    tmp_path: pathlib.Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_job(_write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory"):
        read_job(tmp_path / "none.yaml")


def test_a_file_in_another_encoding_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"job: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_job(path)


def test_merge_keys_and_anchors_work() -> None:
    text = "base: &b {x: 1}\na:\n  <<: *b\n  y: 2\n"
    assert parse_yaml(text, name="x")["a"] == {"x": 1, "y": 2}


def test_a_written_job_reads_back_the_same(tmp_path: pathlib.Path) -> None:
    spec = read_job(_write(tmp_path, JOB), overrides=["rollout.scheduler_options={a: [1, é]}"])
    assert decode_job(parse_yaml(format_job(spec), name="x")) == spec
