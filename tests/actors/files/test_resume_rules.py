"""Which fields may change when a run is continued."""

import pathlib

import msgspec
import pytest

from opdkit.actors.files.config_file import format_job, parse_yaml
from opdkit.actors.files.resume_rules import (
    CHANGEABLE,
    CHANGEABLE_ENGINE_FIELDS,
    check_resume,
    leaves_of,
    may_change,
)
from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError
from tests.protocols.jobs import job_values

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "run_directory.md"


def _paths() -> set[str]:
    """Return the paths of all fields and of all sections."""
    parts = [path.split(".") for path in leaves_of(msgspec.to_builtins(decode_job(job_values())))]
    return {".".join(path[:length]) for path in parts for length in range(1, len(path) + 1)}


@pytest.mark.parametrize("name", CHANGEABLE)
def test_a_rule_is_of_a_field_that_exists_and_is_documented(name: str) -> None:
    assert name in _paths()
    assert f"`{name}`" in PAGE.read_text()


@pytest.mark.parametrize("name", CHANGEABLE_ENGINE_FIELDS)
def test_a_rule_of_the_engines_is_of_a_field_that_exists_and_is_documented(name: str) -> None:
    assert f"student.{name}" in _paths()
    assert f"`{name}`" in PAGE.read_text()


@pytest.mark.parametrize(
    ("path", "is_free"),
    [
        ("pipeline.num_steps", True),
        ("pipeline.max_policy_lag", False),
        ("pipeline.samples_per_step", False),
        ("student.placement.num_cpus", True),
        ("student.model", False),
        ("student.max_model_len", False),
        ("teachers[0].replicas", True),
        ("teachers[0].model", False),
        ("checkpoint.keep", True),
        ("data.train", False),
        ("data.samples_per_prompt", False),
        ("rollout.temperature", False),
        ("trainer.dtype", False),
        ("trainer.parallel.data", True),
        ("trainer.parallel.tensor", False),
        ("simulation.decode_step_s", True),
    ],
)
def test_what_decides_what_is_trained_stays(path: str, is_free: bool) -> None:
    assert may_change(path) is is_free


def test_an_option_that_is_gone_is_a_change() -> None:
    options = [("rollout.scheduler_options", {"tip": "again", "n": 1})]
    saved = decode_job(apply_overrides(job_values(), options))
    with pytest.raises(ConfigError) as caught:
        check_resume(saved, decode_job(job_values()))
    assert str(caught.value).startswith(
        "rollout.scheduler_options.tip is null, but this run began with 'again'"
    )


def test_the_same_job_is_no_change() -> None:
    check_resume(decode_job(job_values()), decode_job(job_values()))
    assert may_change("logging.tensorboard")


@pytest.mark.parametrize("option", [float("nan"), [1.0, float("nan")], {"x": float("nan")}])
def test_an_option_that_is_not_a_number_is_no_change(option: object) -> None:
    text = format_job(
        decode_job(apply_overrides(job_values(), [("rollout.scheduler_options", {"a": option})]))
    )
    check_resume(*(decode_job(parse_yaml(text, name="job.yaml")) for _ in range(2)))
