"""What a job that was left to itself leaves: its results, and nothing else."""

import json

import msgspec
import pytest

from opdkit.actors.files.run_files import RunDirectory
from opdkit.engine.run_parts import RunState
from tests.integration.conftest import Finished

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PNG = b"\x89PNG\r\n\x1a\n"


def test_it_ends_well_and_leaves_nothing_behind(finished: Finished) -> None:
    assert finished.code == 0, finished.errors
    assert finished.left_behind == []


def test_its_metrics_read_as_one_run(finished: Finished) -> None:
    assert [record["step"] for record in finished.records("step")] == [1, 2, 3]
    assert [record["step"] for record in finished.records("evaluation")] == [0, 3]
    times = [record["time"] for record in finished.metrics]
    assert times == sorted(times)


def test_every_prompt_drawn_and_every_token_sampled_is_accounted_for(finished: Finished) -> None:
    for record in finished.records("step"):
        ends = record["trained"] + record["dead"] + record["alive"]
        assert record["drawn"] == ends, record
        assert record["ledger_missing"] == record["ledger_missing_tokens"] == 0
    steps = finished.records("step")
    assert (steps[-1]["trained"], steps[-1]["dead"], steps[-1]["alive"]) == (21, 2, 0)
    # Of rows that were no prompts nothing was sampled; all else was trained on.
    assert steps[-1]["tokens_trained"] == sum(step["num_supervised"] for step in steps)
    assert steps[-1]["tokens_generated"] == steps[-1]["tokens_trained"]


def test_unusable_rows_are_dead_letters_by_line(finished: Finished) -> None:
    lines = (finished.directory / "dead_letters.jsonl").read_text().splitlines()
    dead = {letter["ordinal"]: letter for letter in map(json.loads, lines)}
    assert sorted(dead) == [2, 5]
    assert {letter["reason"] for letter in dead.values()} == {"PromptError"}
    assert "train.jsonl:3 is not JSON" in dead[2]["message"]
    assert dead[5]["prompt_id"].endswith("train.jsonl:6")


def test_its_checkpoint_knows_every_ordinal_as_ended(finished: Finished) -> None:
    checkpoint = RunDirectory(finished.directory, keep=2).newest()
    assert checkpoint is not None
    state = msgspec.msgpack.decode(checkpoint.state, type=RunState)
    assert (checkpoint.step, state.step) == (3, 3)
    assert (state.ledger.frontier, state.ledger.ended_beyond) == (23, ())


def test_engines_served_what_the_trainer_had(finished: Finished) -> None:
    steps = finished.records("step")
    assert all(step["lag_max"] == 0 for step in steps)
    # The trainer's log-probabilities of what the engines sampled, version after version.
    assert all(step["sampler_gap"] < 1e-3 for step in steps)
    assert len({step["loss"] for step in steps}) == 3


def test_its_plot_is_a_picture_and_its_summary_says_what_the_metrics_say(
    finished: Finished,
) -> None:
    assert (finished.directory / "divergence.png").read_bytes().startswith(PNG)
    summary = json.loads((finished.directory / "summary.json").read_bytes())
    last, evaluations = finished.records("step")[-1], finished.records("evaluation")
    assert (summary["status"], summary["num_steps"]) == ("completed", 3)
    assert (summary["num_drawn"], summary["num_trained"], summary["num_dead"]) == (23, 21, 2)
    assert (summary["num_missing"], summary["num_missing_tokens"]) == (0, 0)
    assert summary["num_generated_tokens"] == last["tokens_generated"]
    assert summary["before"]["reverse_kl"] == evaluations[0]["reverse_kl"]
    assert summary["after"]["reverse_kl"] == evaluations[1]["reverse_kl"]
    assert finished.summary == {"kind": "summary", **summary}


def test_a_second_run_says_so_and_changes_nothing(finished: Finished) -> None:
    # The lock and the job's description are written by whoever opens the directory.
    before = _contents(finished)
    result = finished.place.call("run", finished.job)
    assert result.returncode == 0, result.stderr
    assert "complete before this call; raise pipeline.num_steps to go on" in result.stdout
    assert "finished completed after 3 steps" in result.stdout
    assert _contents(finished) == before
    assert finished.place.leftovers() == []


def _contents(finished: Finished) -> dict[str, bytes]:
    files = (path for path in finished.directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files if path.name != "lock"}
