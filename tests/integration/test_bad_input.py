"""Mistakes in a job, as met at the command line: one line, an exit code, and nothing started."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import Place
from tests.integration.conftest import TOO_LONG, prompt_line
from tests.integration.jobs import micro_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

Spoil = Callable[[dict[str, Any], Path], None]


def misspelt_key(job: dict[str, Any], folder: Path) -> None:
    job["rollout"]["max_new_token"] = 3


def missing_file(job: dict[str, Any], folder: Path) -> None:
    job["data"]["train"] = "nowhere.jsonl"


def missing_model(job: dict[str, Any], folder: Path) -> None:
    job["student"]["model"] = "nowhere"


def top_k_over_the_vocabulary(job: dict[str, Any], folder: Path) -> None:
    job["loss"]["top_k"] = 513


def another_tokenizer(job: dict[str, Any], folder: Path) -> None:
    teacher = folder / "teacher"
    teacher.mkdir()
    for file in Path(job["teachers"][0]["model"]).iterdir():
        (teacher / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((teacher / "tokenizer.json").read_bytes())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    job["teachers"][0]["model"] = str(teacher)


def prompt_over_the_context(job: dict[str, Any], folder: Path) -> None:
    _append(folder, prompt_line(TOO_LONG))


def empty_prompt_file(job: dict[str, Any], folder: Path) -> None:
    (folder / "train.jsonl").write_text("")


def row_that_is_no_json(job: dict[str, Any], folder: Path) -> None:
    _append(folder, '{"messages": [}')


def row_without_messages(job: dict[str, Any], folder: Path) -> None:
    _append(folder, '{"prompt": "What?"}')


def more_samples_than_data(job: dict[str, Any], folder: Path) -> None:
    job["data"]["num_epochs"] = 1


def _append(folder: Path, line: str) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write(line + "\n")


TABLE: list[tuple[Spoil, str]] = [
    (misspelt_key, r"rollout\.max_new_token\b.*did you mean .*max_new_tokens"),
    (missing_file, r"data\.train.*nowhere\.jsonl.*No such file"),
    (missing_model, r"student\.model.*nowhere"),
    (top_k_over_the_vocabulary, r"loss\.top_k is 513.*512"),
    (another_tokenizer, r"tokenizer"),
    (prompt_over_the_context, r"train\.jsonl:3 has \d+ tokens"),
    (empty_prompt_file, r"train\.jsonl.*is empty"),
    (row_that_is_no_json, r"train\.jsonl:3 is not JSON"),
    (row_without_messages, r"train\.jsonl:3 has no 'messages', only 'prompt'"),
    (more_samples_than_data, r"data\.num_epochs is 1, which gives 2 samples"),
]


@pytest.mark.parametrize(("spoil", "message"), TABLE, ids=[spoil.__name__ for spoil, _ in TABLE])
def test_a_mistake_is_one_line_and_starts_nothing(
    place: Place, models: Path, spoil: Spoil, message: str
) -> None:
    job = micro_job("bad", models, num_steps=3, samples_per_step=4)
    (place.folder / "train.jsonl").write_text(f"{prompt_line('a')}\n{prompt_line('b')}\n")
    spoil(job, place.folder)
    result = place.call("run", place.write_job(job))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if re.search(message, line)]
    assert len(errors) == 1, result.stderr
    assert re.match(r"error   |opdkit: error: ", errors[0])
    assert not (place.folder / "runs").exists()
    assert place.leftovers() == []
