"""Messages of decoding, one row a mistake."""

from typing import Any

import pytest

from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError
from tests.protocols.jobs import job_values

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too small": (
        {"pipeline.num_steps": 0},
        "pipeline.num_steps is 0, but must be between 1 and 2147483647",
    ),
    "wrong kind": (
        {"pipeline.num_steps": "ten"},
        "pipeline.num_steps is 'ten', but must be an integer, between 1 and 2147483647",
    ),
    "a float for an integer": (
        {"pipeline.num_steps": 1.5},
        "pipeline.num_steps is 1.5, but must be an integer, between 1 and 2147483647",
    ),
    "a boolean for an integer": (
        {"pipeline.num_steps": True},
        "pipeline.num_steps is true, but must be an integer, between 1 and 2147483647",
    ),
    "not one of the choices": (
        {"teachers.0.dtype": "fp8"},
        "teachers[0].dtype is 'fp8', but must be one of auto, bfloat16, float32",
    ),
    "temperature 0": (
        {"rollout.temperature": 0},
        "rollout.temperature is 0, but must be more than 0",
    ),
    "two bounds": (
        {"rollout.top_p": 1.5},
        "rollout.top_p is 1.5, but must be more than 0 and at most 1",
    ),
    "optional with bounds": (
        {"loss.divergence": "jsd", "loss.beta": 2},
        "loss.beta is 2, but must be between 0 and 1, or null",
    ),
    "not finite": (
        {"trainer.optimizer.lr": float("inf")},
        "trainer.optimizer.lr is inf, but must be more than 0",
    ),
    "not a number": (
        {"trainer.optimizer.lr": float("nan")},
        "trainer.optimizer.lr is nan, but must be more than 0",
    ),
    "more than 31 bits": (
        {"pipeline.num_steps": 2**31},
        "pipeline.num_steps is 2147483648, but must be between 1 and 2147483647",
    ),
    "a lag of more than 31 bits": (
        {"pipeline.max_policy_lag": 2**31},
        "pipeline.max_policy_lag is 2147483648, but must be between 0 and 2147483647",
    ),
    "a seed of more than 32 bits": (
        {"job.seed": 2**32},
        "job.seed is 4294967296, but must be between 0 and 4294967295",
    ),
    "a name with a line end": (
        {"job.name": "abc\n"},
        "job.name is 'abc\\n', but must be a name of at most 64 letters, digits, '.', '_' and "
        "'-', with a letter or digit first",
    ),
    "empty path": (
        {"student.model": ""},
        "student.model is '', but must be text that is not empty",
    ),
    "bad name": (
        {"job.name": "my run"},
        "job.name is 'my run', but must be a name of at most 64 letters, digits, '.', '_' and "
        "'-', with a letter or digit first",
    ),
    "not a boolean": (
        {"data.shuffle": "sometimes"},
        "data.shuffle is 'sometimes', but must be true or false",
    ),
    "null for a number": (
        {"pipeline.samples_per_step": None},
        "pipeline.samples_per_step is null, but must be an integer, between 1 and 2147483647",
    ),
    "a value for a section": (
        {"loss": "reverse_kl"},
        "loss is 'reverse_kl', but must be a section: keys with values",
    ),
    "an emptied section": (
        {"pipeline": None},
        "pipeline is null, but must be a section: keys with values",
    ),
    "a mapping for a list": (
        {"teachers": {"model": "t"}},
        "teachers is {'model': 't'}, but must be a list of at least 1",
    ),
    "no teacher": (
        {"teachers": []},
        "teachers is [], but must be a list of at least 1",
    ),
    "an item of a list": (
        {"rollout.stop_token_ids": [2, "x"]},
        "rollout.stop_token_ids[1] is 'x', but must be an integer",
    ),
    "not a mapping": (
        {"rollout.scheduler_options": [1]},
        "rollout.scheduler_options is [1], but must be a mapping of keys to values",
    ),
    "misspelt key": (
        {"pipeline.max_policy_lga": 1},
        "unknown key 'pipeline.max_policy_lga'; did you mean 'max_policy_lag'?",
    ),
    "misspelt section": (
        {"pipelin": {}},
        "unknown key 'pipelin'; did you mean 'pipeline'?",
    ),
    "key in a list": (
        {"teachers.0.modle": "x"},
        "unknown key 'teachers[0].modle'; did you mean 'model'?",
    ),
    "unlike any key": (
        {"job.zzz": 1},
        "unknown key 'job.zzz'; known: name, run_dir, seed",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_path_value_and_bound(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_job(apply_overrides(job_values(), list(changes.items())))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("student", "model", "missing required student.model: text that is not empty"),
        (
            "pipeline",
            "num_steps",
            "missing required pipeline.num_steps: an integer, between 1 and 2147483647",
        ),
    ],
)
def test_a_missing_field_is_named(section: str, key: str, message: str) -> None:
    values = job_values()
    del values[section][key]
    with pytest.raises(ConfigError) as caught:
        decode_job(values)
    assert str(caught.value) == message


def test_a_missing_section_is_named_by_its_required_field() -> None:
    values = job_values()
    del values["student"]
    with pytest.raises(ConfigError, match=r"^missing required student\.model: "):
        decode_job(values)


def test_an_empty_job_misses_its_first_required_field() -> None:
    with pytest.raises(ConfigError, match=r"^missing required job\.name: "):
        decode_job({})


def test_a_job_that_is_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="a job is a mapping of sections, got list"):
        decode_job([])


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        decode_job(apply_overrides(job_values(), [("loss", "x" * 1000)]))
    assert len(str(caught.value)) < 200


def test_a_whole_number_is_accepted_where_a_fraction_may_stand() -> None:
    spec = decode_job(apply_overrides(job_values(), [("rollout.temperature", 1)]))
    assert spec.rollout.temperature == 1.0


def test_an_override_makes_missing_sections_and_leaves_the_original_alone() -> None:
    values = job_values()
    changed = apply_overrides(values, [("trainer.optimizer.lr", 1e-3), ("loss.top_k", 8)])
    assert changed["trainer"] == {"optimizer": {"lr": 1e-3}}
    assert "trainer" not in values
    assert decode_job(changed).loss.top_k == 8


def test_an_override_fills_an_emptied_section() -> None:
    changed = apply_overrides({"loss": None}, [("loss.top_k", 8)])
    assert changed == {"loss": {"top_k": 8}}


def test_an_override_reaches_into_a_list() -> None:
    changed = apply_overrides(job_values(), [("teachers.0.model", "other")])
    assert decode_job(changed).teachers[0].model == "other"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("teachers.3.model", "teachers.3: '3' is no index of a list of 1"),
        ("teachers.first.model", "teachers.first: 'first' is no index of a list of 1"),
        ("student.model.x", "student.model is 'student', not a section"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(job_values(), [(path, 1)])
    assert str(caught.value).startswith(message)


def test_the_largest_seed_is_accepted() -> None:
    values = apply_overrides(job_values(), [("job.seed", 2**32 - 1)])
    assert decode_job(values).job.seed == 2**32 - 1
