"""Micro models for all integration tests, and the finished run that several of them look at."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from opdkit.actors.models.micro import make_micro_pair
from tests.integration.command import Place, running
from tests.integration.jobs import PROMPTS, micro_job

TOO_LONG = "word " * 200


@dataclass(frozen=True)
class Finished:
    """A run that was left to itself."""

    place: Place
    job: str
    directory: Path
    code: int
    summary: dict[str, Any]
    """As it was printed."""
    errors: str
    left_behind: list[str]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of ``metrics.jsonl``."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The metrics of one kind."""
        return [record for record in self.metrics if record["kind"] == kind]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a micro teacher and student."""
    folder = tmp_path_factory.mktemp("models")
    make_micro_pair(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place for one test."""
    place = Place(tmp_path)
    yield place
    place.remove()


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place for the tests of one module."""
    place = Place(tmp_path_factory.mktemp("place"))
    yield place
    place.remove()


@pytest.fixture(scope="session")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Three strictly on-policy steps of seven samples, of data with two unusable rows."""
    place = Place(tmp_path_factory.mktemp("finished"))
    values = micro_job("finished", models, num_steps=3, samples_per_step=7, max_policy_lag=0)
    write_prompts(place.folder / "train.jsonl", num_rows=23)
    write_prompts(place.folder / "held_out.jsonl", num_rows=3, bad=False)
    values["data"] |= {
        "held_out": "held_out.jsonl",
        "shuffle": False,
        "num_epochs": 1,
        "bad_rows": "dead_letter",
    }
    job = place.write_job(values)
    with running(place, job) as run:
        code, errors = run.end()
    yield Finished(
        place=place,
        job=job,
        directory=place.folder / "runs" / "finished",
        code=code,
        summary=run.records[-1],
        errors=errors,
        left_behind=place.until_gone(within_s=5),
    )
    place.remove()


def write_prompts(path: Path, *, num_rows: int, bad: bool = True) -> None:
    """Write prompts; with ``bad``, the third is no JSON and the sixth exceeds the context."""
    lines = [prompt_line(PROMPTS[n % len(PROMPTS)]) for n in range(num_rows)]
    if bad:
        lines[2], lines[5] = "{not JSON", prompt_line(TOO_LONG)
    path.write_text("\n".join(lines) + "\n")


def prompt_line(text: str, **columns: str) -> str:
    """Return one row of a prompt file."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **columns})
