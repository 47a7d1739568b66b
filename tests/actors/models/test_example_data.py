"""The files under examples/: valid, varied, apart, and described by jobs that decode."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no type information

from opdkit.protocols.config_decoding import decode_job

EXAMPLES = Path(__file__).parents[3] / "examples"
CATEGORIES = {
    "knowledge",
    "explanation",
    "arithmetic",
    "rewriting",
    "lists",
    "code",
    "summary",
    "classification",
    "translation",
    "dialogue",
    "advice",
    "creative",
}


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / "data" / name).read_text().splitlines()]


def prompt_of(row: dict[str, Any]) -> str:
    (message,) = row["messages"]
    assert message.keys() == {"role", "content"}
    assert message["role"] == "user"
    content: str = message["content"]
    assert content == content.strip()
    assert content
    return content


def words_of(prompt: str) -> set[str]:
    return set(re.findall(r"\w+", prompt.lower()))


@pytest.mark.parametrize(
    ("name", "num_rows"), [("prompts_train.jsonl", 403), ("prompts_held_out.jsonl", 64)]
)
def test_prompts_are_valid_distinct_and_of_all_categories(name: str, num_rows: int) -> None:
    rows = read_rows(name)
    assert len(rows) == num_rows
    assert all(row.keys() == {"id", "category", "messages"} for row in rows)
    assert len({row["id"] for row in rows}) == num_rows
    assert len({prompt_of(row) for row in rows}) == num_rows
    counts = Counter(row["category"] for row in rows)
    assert counts.keys() == CATEGORIES
    assert max(counts.values()) - min(counts.values()) <= 2
    openings = Counter(" ".join(prompt_of(row).split()[:4]) for row in rows)
    assert max(openings.values()) <= num_rows // 40 + 2


def test_no_held_out_prompt_has_a_near_copy_in_training() -> None:
    train = [words_of(prompt_of(row)) for row in read_rows("prompts_train.jsonl")]
    for row in read_rows("prompts_held_out.jsonl"):
        words = words_of(prompt_of(row))
        closest = max(train, key=lambda other: len(words & other) / len(words | other))
        overlap = len(words & closest) / len(words | closest)
        assert overlap <= 0.5, (row["id"], sorted(closest))


def test_sums_have_numbers_for_answers() -> None:
    rows = read_rows("sums.jsonl")
    assert all(row.keys() == {"id", "messages", "answer"} for row in rows)
    assert len({row["id"] for row in rows}) == len({prompt_of(row) for row in rows}) == 60
    assert all(re.fullmatch(r"-?\d+", row["answer"]) for row in rows)


@pytest.mark.parametrize("name", ["smollm2.yaml", "micro.yaml"])
def test_example_jobs_decode_and_name_files_that_exist(name: str) -> None:
    spec = decode_job(yaml.safe_load((EXAMPLES / name).read_text()))
    assert spec.data.held_out is not None
    for path in (spec.data.train, spec.data.held_out):
        assert (EXAMPLES.parent / path).is_file()
