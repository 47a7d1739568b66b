"""From one step's parts to one flat record of metrics, and to what a watcher is shown."""

from collections.abc import Sequence
from statistics import fmean

from opdkit.engine.balance import Balance
from opdkit.engine.stage_report import Stage, StageRates, StepTiming, bounding_stage, stage_rates
from opdkit.protocols.messages import (
    ProgressRecord,
    RolloutWorkerReport,
    SampleMeta,
    StageMeter,
    StepReport,
)

Values = dict[str, float | int | str]
IDLE = RolloutWorkerReport(
    student=StageMeter(),
    teacher=StageMeter(),
    num_in_flight_tokens=0,
    loop_lag_p99_s=0.0,
    counters={},
)


class StepRecorder:
    """Turns counters into rates, from one step to the next."""

    def __init__(self, *, num_steps: int, queue_bound: int, now_s: float) -> None:
        self._num_steps = num_steps
        self._queue_bound = queue_bound
        self._last_s = now_s
        self._last = IDLE

    def start(self, rollouts: RolloutWorkerReport, *, now_s: float) -> None:
        """Begin to count from here."""
        self._last, self._last_s = rollouts, now_s

    def record(
        self,
        samples: Sequence[SampleMeta],
        report: StepReport,
        *,
        timing: StepTiming,
        rollouts: RolloutWorkerReport,
        balance: Balance,
        num_queued: int,
        now_s: float,
    ) -> tuple[Values, ProgressRecord]:
        """Return the metrics of a step, and its line of progress."""
        elapsed_s = max(now_s - self._last_s, 1e-9)
        student = stage_rates(self._last.student, rollouts.student, elapsed_s=elapsed_s)
        teacher = stage_rates(self._last.teacher, rollouts.teacher, elapsed_s=elapsed_s)
        self._last, self._last_s = rollouts, now_s
        lags = [report.step - sample.oldest_version for sample in samples]
        trainer_tokens_per_s = report.num_tokens / elapsed_s
        values: Values = {
            **_loss_values(report),
            **_sample_values(samples),
            **account_values(balance),
            "lag_mean": fmean(lags),
            "lag_max": max(lags),
            "queue_samples": num_queued,
            "step_s": elapsed_s,
            "train_s": timing.train_s,
            "batch_wait_s": timing.batch_wait_s,
            "fetch_s": timing.fetch_s,
            "publish_wait_s": timing.publish_wait_s,
            "student_tokens_per_s": student.generated_tokens_per_s,
            "student_busy": student.busy_fraction,
            "teacher_tokens_per_s": teacher.prompt_tokens_per_s,
            "teacher_busy": teacher.busy_fraction,
            "trainer_tokens_per_s": trainer_tokens_per_s,
            "trainer_busy": timing.train_s / elapsed_s,
            "samples_per_s": len(samples) / elapsed_s,
            "loop_lag_p99_s": rollouts.loop_lag_p99_s,
            **{f"count_{name}": count for name, count in rollouts.counters.items()},
        }
        values["bounding_stage"] = str(bounding_stage(values))
        progress = ProgressRecord(
            phase="training",
            step=report.step + 1,
            num_steps=self._num_steps,
            loss=report.loss,
            lag=fmean(lags),
            queue_samples=num_queued,
            queue_bound=self._queue_bound,
            tokens_per_s=_rates(student, teacher, trainer_tokens_per_s),
            busy=_busy(student, teacher, timing.train_s / elapsed_s),
            eta_s=(self._num_steps - report.step - 1) * elapsed_s,
        )
        return values, progress


def _rates(student: StageRates, teacher: StageRates, trainer: float) -> dict[str, float]:
    return {
        Stage.STUDENT: student.generated_tokens_per_s,
        Stage.TEACHER: teacher.prompt_tokens_per_s,
        Stage.TRAINER: trainer,
    }


def _busy(student: StageRates, teacher: StageRates, trainer: float) -> dict[str, float]:
    return {
        Stage.STUDENT: student.busy_fraction,
        Stage.TEACHER: teacher.busy_fraction,
        Stage.TRAINER: trainer,
    }


def _loss_values(report: StepReport) -> Values:
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "reverse_kl_estimate": report.reverse_kl_estimate,
        "sampler_gap": report.sampler_gap,
        "student_mass": report.student_mass,
        "num_tokens": report.num_tokens,
        "num_supervised": report.num_supervised,
        "num_uncovered": report.num_uncovered,
        "num_microbatches": report.num_microbatches,
    }


def _sample_values(samples: Sequence[SampleMeta]) -> Values:
    return {
        "num_samples": len(samples),
        "generated_tokens_mean": fmean(sample.num_generated_tokens for sample in samples),
        "turns_mean": fmean(sample.num_turns for sample in samples),
        "truncated_fraction": fmean(sample.finish_reason == "length" for sample in samples),
        "generate_s_mean": fmean(sample.generate_s for sample in samples),
        "score_s_mean": fmean(sample.score_s for sample in samples),
    }


def account_values(balance: Balance) -> Values:
    """Return both accounts and what is missing from them."""
    return {
        "drawn": balance.num_drawn,
        "alive": balance.num_alive,
        "trained": balance.num_trained,
        "dead": balance.num_dead,
        "ledger_missing": balance.num_missing,
        "tokens_generated": balance.num_generated_tokens,
        "tokens_trained": balance.num_trained_tokens,
        "tokens_in_flight": balance.num_in_flight_tokens,
        "tokens_dead": balance.num_dead_tokens,
        "ledger_missing_tokens": balance.num_missing_tokens,
    }
