"""The configuration page says what the code says."""

import pathlib

import msgspec

from opdkit.actors.files.config_reference import render
from opdkit.protocols.config import JobSpec

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "run: python -m opdkit.actors.files.config_reference >docs/configuration.md"
    )


def test_every_section_and_a_field_of_each_kind_are_described() -> None:
    page = render()
    for field in msgspec.structs.fields(JobSpec):
        assert f"## `{field.name}" in page
    for row in (
        "| `num_steps` | **required** | an integer, between 1 and 2147483647 | Optimizer steps of",
        "| `dtype` | `auto` | one of auto, bfloat16, float32 |",
        "| `scheduler_options` | `{}` | a mapping of keys to values |",
        "| `stop_token_ids` | `[]` | a list |",
        "## `trainer.optimizer`",
        "## `teachers[i].placement`",
    ):
        assert row in page
