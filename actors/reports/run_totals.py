"""From a run's files to its summary: what was measured is read back, not remembered.

So the summary of a resumed run covers all of it, and a failed run has one too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from opdkit.actors.files.metric_sinks import read_metrics
from opdkit.actors.files.run_files import RunDirectory
from opdkit.actors.reports.run_report import RunSummary, Status
from opdkit.engine.stage_report import Stage, time_by_stage
from opdkit.protocols.config import JobSpec
from opdkit.protocols.messages import EvaluationReport

Record = Mapping[str, Any]


def summarise(
    spec: JobSpec, directory: RunDirectory, *, status: Status, cause: str, wall_s: float
) -> RunSummary:
    """Add up the metrics of a run."""
    records = read_metrics(directory.metrics)
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [_evaluation(record) for record in records if record["kind"] == "evaluation"]
    accounts = [record for record in records if record["kind"] in ("step", "ledger")]
    last = accounts[-1] if accounts else {}
    checkpoint = directory.newest()
    return RunSummary(
        name=spec.job.name,
        status=status,
        cause=cause,
        num_steps=int(last.get("step", 0)),
        wall_s=wall_s,
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if len(evaluations) > 1 else None,
        tokens_per_s=_rates(steps),
        waited_s=_waits(steps),
        num_drawn=int(last.get("drawn", 0)),
        num_trained=int(last.get("trained", 0)),
        num_dead=int(last.get("dead", 0)),
        num_alive=int(last.get("alive", 0)),
        num_missing=int(last.get("ledger_missing", 0)),
        num_generated_tokens=int(last.get("tokens_generated", 0)),
        num_trained_tokens=int(last.get("tokens_trained", 0)),
        num_dead_tokens=int(last.get("tokens_dead", 0)),
        num_missing_tokens=int(last.get("ledger_missing_tokens", 0)),
        run_dir=str(directory.path),
        checkpoint=str(checkpoint.path) if checkpoint else None,
        export=str(directory.export) if directory.export.exists() else None,
        plot=str(directory.plot) if directory.plot.exists() else None,
    )


def _evaluation(record: Record) -> EvaluationReport:
    fields = EvaluationReport.__struct_fields__
    return msgspec.convert({name: record[name] for name in fields}, EvaluationReport)


def _rates(steps: Sequence[Record]) -> dict[str, float]:
    """Return tokens per second of each stage, over the wall time of all steps."""
    total_s = sum(step["step_s"] for step in steps)
    if total_s <= 0:
        return {}
    return {
        stage: sum(step[f"{stage}_tokens_per_s"] * step["step_s"] for step in steps) / total_s
        for stage in (Stage.STUDENT, Stage.TEACHER, Stage.TRAINER)
    }


def _waits(steps: Sequence[Record]) -> dict[str, float]:
    waits = dict.fromkeys(Stage, 0.0)
    for step in steps:
        for stage, seconds in time_by_stage(step).items():
            waits[stage] += seconds
    return {str(stage): seconds for stage, seconds in waits.items()}
