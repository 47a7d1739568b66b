"""How near does the engine come to what its lag allows, and what does the lag bring?

The engine itself in virtual time (``opdkit.engine.simulation``), over how much reply lengths
differ, how long generation takes against training, and two kinds of decoder. Beside it two
schedules that others use, as if their hand-overs cost nothing: strictly in turn, and one step off,
where the next batch is generated as a whole while this one is trained on.
"""

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from opdkit.benchmarks.report import (
    BenchmarkReport,
    Bound,
    Figure,
    Limit,
    check,
    figures_of,
    make_report,
    this_machine,
)
from opdkit.engine.simulation import drawn_replies, simulate
from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import decode_job

SIGMAS = (0.5, 0.8, 1.0)
RATIOS = (0.5, 1.0, 2.0)
"""Generation of a batch alone over its training."""
DECODERS = {
    "fixed": {"decode_step_s": 0.02, "decode_sequence_s": 0.0},
    "roofline": {"decode_step_s": 0.02, "decode_sequence_s": 0.0002},
}
LAGS = (1, 2, 3, 4)
SIZE = 32
"""Samples per step."""
NUM_STEPS = 100
QUICK_NUM_STEPS = 20
NUM_RUNS = 3
UPDATE_S = 0.2
"""Export and update, each."""
MIN_REACHED = 0.97

BOUND = (
    "the slowest stage, or what the lag allows with no reply slowed by another, whichever is less; "
    "from the same draws"
)


def measure(*, num_runs: int | None, is_quick: bool) -> BenchmarkReport:
    """Simulate every case with every lag."""
    machine = this_machine()
    num_runs = num_runs or (1 if is_quick else NUM_RUNS)
    num_steps = QUICK_NUM_STEPS if is_quick else NUM_STEPS
    figures: dict[str, Figure] = {}
    limits: dict[str, Limit] = {}
    bounds: list[Bound] = []
    for sigma, ratio, decoder in itertools.product(SIGMAS, RATIOS, DECODERS):
        case = f"{decoder}_sigma{sigma}_ratio{ratio}"
        runs = [
            run_case(decoder, sigma=sigma, ratio=ratio, seed=seed, num_steps=num_steps)
            for seed in range(num_runs)
        ]
        figures |= {f"{case}.{name}": value for name, value in figures_of(runs).items()}
        for lag in LAGS:
            rate = f"{case}.lag{lag}_samples_per_s"
            value = median(run[f"lag{lag}_bound_per_s"] for run in runs)
            limits[rate] = Limit(value=value, basis=BOUND)
            bounds.append(check(figures, f"{case}.lag{lag}_max", "<=", lag))
            if not is_quick:
                bounds.append(check(figures, f"{case}.lag{lag}_reached_ratio", ">=", MIN_REACHED))
    return make_report(
        "schedules",
        machine=machine,
        config={"samples_per_step": SIZE, "num_steps": num_steps, "num_runs": num_runs},
        figures=figures,
        limits=limits,
        bounds=bounds,
    )


def run_case(
    decoder: str, *, sigma: float, ratio: float, seed: int, num_steps: int
) -> dict[str, float]:
    """Return the rates of each schedule on the same draws."""
    spec = make_spec(decoder, sigma=sigma, ratio=ratio, seed=seed, num_steps=num_steps, lag=0)
    in_turn = simulate(spec).samples_per_s
    one_off = one_step_off(spec)
    figures = {"in_turn_samples_per_s": in_turn, "one_step_off_samples_per_s": one_off}
    for lag in LAGS:
        report = simulate(
            make_spec(decoder, sigma=sigma, ratio=ratio, seed=seed, num_steps=num_steps, lag=lag)
        )
        figures |= {
            f"lag{lag}_samples_per_s": report.samples_per_s,
            f"lag{lag}_bound_per_s": report.bounds.together,
            f"lag{lag}_reached_ratio": report.reached,
            f"lag{lag}_over_in_turn_ratio": report.samples_per_s / in_turn,
            f"lag{lag}_over_one_step_off_ratio": report.samples_per_s / one_off,
            f"lag{lag}_max": max(report.lags),
            f"lag{lag}_length_ratio": report.length_ratio,
        }
    return figures


def one_step_off(spec: JobSpec) -> float:
    """Return the samples per second of whole batches, each generated while one trains."""
    simulation = spec.simulation
    train_s = simulation.train_step_s + simulation.export_s
    steps_s = [max(seconds, train_s) + simulation.update_s for seconds in batches_s(spec)]
    return SIZE / fmean(steps_s)


def batches_s(spec: JobSpec) -> list[float]:
    """Return how long each batch of the job takes alone."""
    replies = drawn_replies(spec)
    return [batch_s(spec, replies[first : first + SIZE]) for first in range(0, len(replies), SIZE)]


def batch_s(spec: JobSpec, replies: Sequence[int]) -> float:
    """Return how long a batch takes alone: the fewer replies are left, the faster they are."""
    simulation = spec.simulation
    seconds, done = 0.0, 0
    for num_active, length in zip(range(len(replies), 0, -1), sorted(replies), strict=True):
        step_s = simulation.decode_step_s + simulation.decode_sequence_s * num_active
        seconds += (length - done) * step_s
        done = length
    return seconds


def make_spec(
    decoder: str, *, sigma: float, ratio: float, seed: int, num_steps: int, lag: int
) -> JobSpec:
    """Return a job whose training takes what a batch's generation does, over ``ratio``."""
    speeds = {**DECODERS[decoder], "reply_tokens_sigma": sigma, "reply_tokens_median": 200.0}
    untimed = _decode(speeds, seed=seed, num_steps=num_steps, lag=lag)
    generate_s = fmean(batches_s(untimed))
    return _decode(
        speeds | {"train_step_s": generate_s / ratio}, seed=seed, num_steps=num_steps, lag=lag
    )


def _decode(speeds: Mapping[str, float], *, seed: int, num_steps: int, lag: int) -> JobSpec:
    values: dict[str, Any] = {
        "job": {"name": "schedules", "seed": seed},
        "student": {"model": "none", "max_model_len": 8192, "max_num_seqs": SIZE * (1 + max(LAGS))},
        "teachers": [{"model": "none", "max_model_len": 8193}],
        "data": {"train": "none"},
        "rollout": {"max_new_tokens": 4096},
        "trainer": {"microbatch_tokens": 8192},
        "pipeline": {"num_steps": num_steps, "samples_per_step": SIZE, "max_policy_lag": lag},
        "checkpoint": {"every_steps": num_steps},
        "simulation": {
            "prompt_tokens": 50,
            "score_request_s": 0.001,
            "score_token_s": 0.0,
            "train_token_s": 0.0,
            "export_s": UPDATE_S,
            "update_s": UPDATE_S,
            **speeds,
        },
    }
    return decode_job(values)
