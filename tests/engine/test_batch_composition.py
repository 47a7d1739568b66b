"""The rule keeps the lag bound, throws nothing away, never stops, and starves nobody."""

import random
from dataclasses import replace
from itertools import combinations, count
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdkit.engine.batch_composition import demand, shortage
from opdkit.protocols.messages import Demand
from tests.engine.pipeline_simulation import Checkpoint, Setting, Simulation

PACES = {
    "rollouts bound": Setting(rollout_s=4.0),
    "trainer bound": Setting(rollout_s=0.2),
    "publication late": Setting(rollout_s=0.5, publish_s=3.0),
    "odd batches": Setting(samples_per_step=3, num_ordinals=100),
    "one a step": Setting(samples_per_step=1, num_ordinals=40),
}


def living(setting: Setting) -> list[int]:
    return [n for n in range(setting.num_ordinals) if not setting.dies(n)]


@pytest.mark.parametrize("dead_every", [0, 5, 2])
@pytest.mark.parametrize("max_policy_lag", range(5))
@pytest.mark.parametrize("pace", PACES)
def test_every_living_sample_is_trained_once_within_its_lag(
    pace: str, max_policy_lag: int, dead_every: int
) -> None:
    setting = replace(PACES[pace], max_policy_lag=max_policy_lag, dead_every=dead_every)
    for seed in range(4):
        simulation = Simulation(setting, seed=seed)
        simulation.run()
        assert sorted(simulation.trained) == living(setting)  # so it did not stop early, either
        assert max(simulation.lags) <= max_policy_lag


@pytest.mark.parametrize("max_policy_lag", range(5))
def test_a_job_of_so_many_steps_replaces_its_dead_and_has_full_batches_to_the_end(
    max_policy_lag: int,
) -> None:
    setting = Setting(max_policy_lag=max_policy_lag, num_ordinals=999, num_wanted=80, dead_every=3)
    for seed in range(4):
        simulation = Simulation(setting, seed=seed)
        simulation.run()
        assert simulation.batch_sizes == [setting.samples_per_step] * 20
        assert len(set(simulation.trained)) == 80


@pytest.mark.parametrize("max_policy_lag", range(5))
def test_nobody_is_overtaken_by_more_than_the_slots_allow(max_policy_lag: int) -> None:
    setting = Setting(max_policy_lag=max_policy_lag, rollout_s=3.0, num_ordinals=200)
    most = setting.slots + max_policy_lag * setting.samples_per_step
    for seed in range(4):
        simulation = Simulation(setting, seed=seed)
        simulation.run()
        trained = simulation.trained
        for place, ordinal in enumerate(trained):
            assert max(trained[: place + 1]) - ordinal < most


def test_slow_samples_are_trained_as_often_as_they_are_drawn() -> None:
    setting = Setting(samples_per_step=8, max_policy_lag=2, rollout_s=2.0, num_ordinals=4000)
    simulation = Simulation(setting, seed=0)
    while len(simulation.trained) < 2000 and simulation.advance():
        pass
    trained_s = fmean(simulation.duration_s[n] for n in simulation.trained)
    drawn_s = fmean(list(simulation.duration_s.values())[: len(simulation.trained)])
    assert trained_s == pytest.approx(drawn_s, rel=0.03)


@pytest.mark.parametrize("max_policy_lag", [0, 1, 3])
@pytest.mark.parametrize("dead_every", [0, 6])
def test_ten_kills_at_random_lose_and_repeat_nothing(max_policy_lag: int, dead_every: int) -> None:
    setting = Setting(max_policy_lag=max_policy_lag, num_ordinals=160, dead_every=dead_every)
    for seed in range(3):
        rng = random.Random(seed)
        saved: Checkpoint | None = None
        for life in range(10):
            simulation = Simulation(setting, seed=100 * seed + life, resumed=saved)
            for _ in range(rng.randrange(60)):
                simulation.advance()
                if rng.random() < 0.1:
                    saved = simulation.checkpoint()
        simulation = Simulation(setting, seed=seed, resumed=saved)
        simulation.run()
        assert sorted(simulation.trained) == living(setting)


def test_the_quota_of_a_horizon_is_what_the_steps_up_to_it_cannot_take_later() -> None:
    wanted = demand(
        step=10,
        alive_by_due={10: 1, 11: 5, 12: 5},
        samples_per_step=4,
        max_policy_lag=2,
        exhausted=False,
    )
    assert wanted == Demand(count=4, quotas=((10, 1), (11, 2), (12, 3)))


def test_strictly_on_policy_takes_the_whole_batch_of_the_version() -> None:
    wanted = demand(
        step=3, alive_by_due={3: 4}, samples_per_step=4, max_policy_lag=0, exhausted=False
    )
    assert wanted == Demand(count=4, quotas=((3, 4),))


@pytest.mark.parametrize(("exhausted", "count"), [(False, 4), (True, 3)])
def test_only_the_end_of_the_data_makes_a_batch_smaller(exhausted: bool, count: int) -> None:
    wanted = demand(
        step=0, alive_by_due={1: 3}, samples_per_step=4, max_policy_lag=1, exhausted=exhausted
    )
    assert wanted == Demand(count=count)


def test_nothing_alive_at_the_end_means_nothing_is_wanted() -> None:
    wanted = demand(step=7, alive_by_due={}, samples_per_step=4, max_policy_lag=1, exhausted=True)
    assert wanted == Demand(count=0)


def test_more_due_than_steps_can_take_is_refused() -> None:
    with pytest.raises(ValueError, match="9 samples are due by step 6, but steps 5 to 6 take 8"):
        demand(step=5, alive_by_due={6: 9}, samples_per_step=4, max_policy_lag=1, exhausted=False)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    count = draw(st.integers(1, 4))
    leasts = sorted(draw(st.sets(st.integers(1, count), max_size=3)))
    dues = sorted(draw(st.sets(st.integers(0, 4), min_size=len(leasts), max_size=len(leasts))))
    return Demand(count=count, quotas=tuple(zip(dues, leasts, strict=True)))


def is_met(wanted: Demand, batch: tuple[int, ...]) -> bool:
    return len(batch) == wanted.count and all(
        sum(due <= limit for due in batch) >= least for limit, least in wanted.quotas
    )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(wanted=demands(), dues=st.lists(st.integers(0, 5), max_size=6))
def test_shortage_is_the_least_number_of_urgent_samples_that_completes_a_batch(
    wanted: Demand, dues: list[int]
) -> None:
    urgent = -1
    fewest = next(
        missing
        for missing in count()
        for batch in combinations([urgent] * missing + dues, wanted.count)
        if is_met(wanted, batch)
    )
    assert shortage(wanted, sorted(dues)) == fewest
    if fewest == 0:
        assert is_met(wanted, tuple(sorted(dues)[: wanted.count]))
