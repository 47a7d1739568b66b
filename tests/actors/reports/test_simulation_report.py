"""A simulation is sized up for people and for programs."""

import io
import json
import pathlib
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # ships no type information
from rich.console import Console

from opdkit.actors.cli import main
from opdkit.actors.reports.simulation_report import print_sizing, size_job
from opdkit.engine.stage_report import Stage
from opdkit.protocols.config_decoding import decode_job
from tests.protocols.jobs import job_values

SPEEDS = {"prompt_tokens": 20, "reply_tokens_median": 40.0, "train_token_s": 0.01}


def values() -> dict[str, Any]:
    job = job_values() | {"simulation": SPEEDS}
    job["pipeline"]["num_steps"] = 20
    return job


def test_more_of_what_bounds_a_job_helps_it_most() -> None:
    sizing = size_job(decode_job(values()))
    assert sizing.report.bounding_stage is Stage.TRAINER
    assert max(sizing.gains, key=lambda stage: sizing.gains[stage]) is Stage.TRAINER
    stream = io.StringIO()
    print_sizing(sizing, Console(file=stream, width=200))
    page = stream.getvalue()
    assert "bound by             trainer: " in page
    assert "of the bound" in page
    assert "+1 data rank" in page


def test_a_program_gets_the_figures(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither the models nor the data of the job exist.
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump(values()))
    assert main(["simulate", str(config), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["kind"] == "simulation"
    assert line["report"]["bounding_stage"] == "trainer"
    assert 0 < line["report"]["reached"] <= 1.001
    assert set(line["gains"]) == {"student", "teacher", "trainer"}
