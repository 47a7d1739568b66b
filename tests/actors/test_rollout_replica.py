"""The reports of several rollout workers are one."""

from opdkit.actors.rollout_replica import summed
from opdkit.protocols.messages import RolloutWorkerReport, StageMeter


def make_report(scale: int, **counters: int) -> RolloutWorkerReport:
    return RolloutWorkerReport(
        student=StageMeter(busy_s=1.5 * scale, num_requests=scale, num_generated_tokens=10 * scale),
        teacher=StageMeter(busy_s=0.5 * scale, num_prompt_tokens=20 * scale),
        num_in_flight_tokens=scale,
        loop_lag_p99_s=0.01 * scale,
        counters=counters,
    )


def test_counters_add_up_and_the_worst_loop_lag_counts() -> None:
    total = summed([make_report(1, finished=2), make_report(3, finished=1, retries=4)])
    assert total.student == StageMeter(busy_s=6.0, num_requests=4, num_generated_tokens=40)
    assert total.teacher == StageMeter(busy_s=2.0, num_prompt_tokens=80)
    assert total.num_in_flight_tokens == 4
    assert total.loop_lag_p99_s == 0.03
    assert total.counters == {"finished": 3, "retries": 4}


def test_no_worker_has_done_nothing() -> None:
    assert summed([]).student == StageMeter()
