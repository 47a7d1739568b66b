# pyright: basic
"""Steps of one rank and of several against a dense float64 reference."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from opdkit.protocols.config import LossSection, OptimizerSection
from opdkit.protocols.messages import Sample, StepPlan
from tests.actors.megatron.micro import (
    by_id,
    make_plan,
    make_sample,
    settings_for,
    without_supervision,
    write_model,
)
from tests.actors.megatron.ranks import run_ranks
from tests.actors.megatron.reference import DenseTrainer, named

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

NUM_STEPS = 5
SAMPLES_PER_STEP = 7

UNCLIPPED = OptimizerSection(lr=1e-3, schedule="constant", clip_grad=1e6)
CLIPPED = OptimizerSection(lr=1e-3, schedule="constant", clip_grad=0.05, weight_decay=0.1)


def steps_of_samples(top_k: int = 8) -> list[list[Sample]]:
    """Return the samples of some steps: unequal lengths, one or two segments each."""
    return [
        [
            make_sample(
                f"step{step}-{n}",
                lengths=(2 + (5 * n + step) % 17, 8) if n % 3 == 0 else (3 + (7 * n) % 19,),
                seed=100 * step + n,
                top_k=top_k,
            )
            for n in range(SAMPLES_PER_STEP)
        ]
        for step in range(NUM_STEPS)
    ]


def train(session: Any, plans: list[StepPlan], samples: list[dict[str, Sample]]) -> Any:
    """Return the reports, the last gradients and the weights, both by Hugging Face's names."""
    from opdkit.actors.megatron.conversion import split
    from opdkit.actors.megatron.export import stream_hf

    reports = [session.train(plan, one) for plan, one in zip(plans, samples, strict=True)]
    student = session.student
    gradients: dict[str, Any] = {}
    if session._settings.trainer.parallel.tensor == 1:
        for name, parameter in student.model.module.named_parameters():
            for hf_name, part in split(name, parameter.main_grad, student.architecture):
                gradients[hf_name] = part.numpy()
    weights = {name: part.numpy() for name, part in stream_hf(student, torch.float32)}
    return reports, gradients, weights


LOSSES = {
    "reverse": LossSection(top_k=8),
    "jsd-by-sequence": LossSection(divergence="jsd", beta=0.3, top_k=8, normalize="sequence"),
    "forward-full": LossSection(divergence="forward_kl", support="full", temperature=2.0),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradient_is_that_of_the_dense_reference(tmp_path: Path, loss: LossSection) -> None:
    model = write_model(tmp_path / "model", kind="qwen3", tied=True)
    samples = steps_of_samples(top_k=8 if loss.support == "top_k" else 0)[0]
    settings = settings_for(model, loss=loss, optimizer=UNCLIPPED)
    plan = make_plan(samples)
    [([report], gradients, _)] = run_ranks(train, settings, [plan], [by_id(samples)])
    reference = DenseTrainer(model, loss, UNCLIPPED)
    expected_loss, expected_norm = reference.step(samples)
    assert report.loss == pytest.approx(expected_loss, rel=1e-5)
    assert report.grad_norm == pytest.approx(expected_norm, rel=1e-5)
    assert report.num_supervised == plan.num_supervised
    for name, expected in named(reference.model, gradients=True).items():
        actual = torch.tensor(gradients[name]).double()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-7, msg=name)


def train_and_evaluate(session: Any, plan: StepPlan, samples: dict[str, Sample]) -> Any:
    """Return the evaluation before the step, and the step's report."""
    return session.evaluate(plan, samples), session.train(plan, samples)


@pytest.mark.parametrize(
    "layout", [{}, {"data": 2}, {"tensor": 2}], ids=["1", "data-2", "tensor-2"]
)
def test_reports_are_exact_means_over_all_ranks(tmp_path: Path, layout: dict[str, Any]) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = steps_of_samples()[0]
    jsd = LossSection(divergence="jsd", beta=0.5, top_k=8, normalize="sequence")
    settings = settings_for(model, loss=jsd, sampling_temperature=0.7, **layout)
    plan = make_plan(samples, data=layout.get("data", 1))
    results = run_ranks(train_and_evaluate, settings, plan, by_id(samples))
    measured = LossSection(divergence="reverse_kl", top_k=8)
    reverse_kl, _ = DenseTrainer(model, measured, UNCLIPPED).step(samples)
    reference = DenseTrainer(model, jsd, UNCLIPPED)
    ratio, gap, mass = reference.diagnostics(samples, sampling_temperature=0.7)
    for evaluation, report in results:
        assert report.reverse_kl_estimate == pytest.approx(ratio, rel=1e-5)
        assert report.sampler_gap == pytest.approx(gap, rel=1e-5)
        assert report.student_mass == pytest.approx(mass, rel=1e-5)
        assert report.num_uncovered == 0
        assert report.num_tokens == sum(
            scored.segment.num_tokens for sample in samples for scored in sample.segments
        )
        assert evaluation.reverse_kl_on_support == pytest.approx(reverse_kl, rel=1e-5)
        assert evaluation.reverse_kl == pytest.approx(ratio, rel=1e-5)
        assert evaluation.num_samples == SAMPLES_PER_STEP
        assert evaluation.num_supervised == plan.num_supervised


def test_bfloat16_follows_the_reference_closely(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    batches = steps_of_samples()
    settings = settings_for(model, dtype="bfloat16", optimizer=CLIPPED)
    plans = [make_plan(samples) for samples in batches]
    [(reports, _, _)] = run_ranks(train, settings, plans, [by_id(one) for one in batches])
    reference = DenseTrainer(model, settings.loss, CLIPPED)
    for samples, report in zip(batches, reports, strict=True):
        assert report.loss == pytest.approx(reference.step(samples)[0], rel=0.01)


LAYOUTS = {
    "single": {},
    "recompute": {"recompute": True},
    "data-2": {"data": 2},
    "tensor-2": {"tensor": 2},
    "tensor-2-sequence": {"tensor": 2, "sequence": True},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_five_steps_are_those_of_the_dense_reference(
    tmp_path: Path, kind: str, tied: bool, layout: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", kind=kind, tied=tied)
    batches = steps_of_samples()
    plans = [make_plan(samples, data=layout.get("data", 1)) for samples in batches]
    settings = settings_for(model, optimizer=CLIPPED, **layout)
    results = run_ranks(train, settings, plans, [by_id(samples) for samples in batches])
    reference = DenseTrainer(model, settings.loss, CLIPPED)
    for step, samples in enumerate(batches):
        expected_loss, expected_norm = reference.step(samples)
        reports = [reports[step] for reports, _, _ in results]
        # To the last bit, or ranks might disagree on whether to skip.
        assert len({(report.loss, report.grad_norm) for report in reports}) == 1
        assert reports[0].loss == pytest.approx(expected_loss, rel=1e-5)
        assert reports[0].grad_norm == pytest.approx(expected_norm, rel=1e-4)
    weights = results[0][2]
    for name, expected in named(reference.model).items():
        actual = torch.tensor(weights[name]).double()
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-5, msg=name)


def test_empty_microbatch_and_empty_rank_change_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = [make_sample("only", lengths=(9,), seed=1)]
    plan = make_plan(samples)
    padded = msgspec.structs.replace(plan, microbatches=((*plan.microbatches[0], ()), ((), ())))
    [alone] = run_ranks(train, settings_for(model), [plan], [by_id(samples)])
    filled, _ = run_ranks(train, settings_for(model, data=2), [padded], [by_id(samples)])
    assert filled[0][0].loss == pytest.approx(alone[0][0].loss, rel=1e-6)
    assert filled[0][0].num_supervised == alone[0][0].num_supervised == plan.num_supervised
    assert filled[0][0].num_tokens == alone[0][0].num_tokens == 9
    for name, expected in alone[2].items():
        torch.testing.assert_close(torch.tensor(filled[2][name]), torch.tensor(expected))


@pytest.mark.parametrize("support", ["top_k", "full"])
def test_batch_without_supervision_has_loss_and_gradient_zero(tmp_path: Path, support: Any) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    sample = without_supervision(make_sample("masked", lengths=(5,), seed=1))
    settings = settings_for(model, loss=LossSection(support=support, top_k=8))
    [([report], gradients, _)] = run_ranks(
        train, settings, [make_plan([sample])], [by_id([sample])]
    )
    assert (report.loss, report.grad_norm, report.num_supervised) == (0.0, 0.0, 0)
    assert not report.skipped
    assert all(not gradient.any() for gradient in gradients.values())


def train_after_poison(session: Any, plan: StepPlan, samples: dict[str, Sample]) -> Any:
    """Return a report, and whether weights, optimizer and schedule stayed as they were."""
    student = session.student
    session.train(plan, samples)
    first = next(student.model.module.parameters())
    good, steps = first.detach().clone(), student.schedule.num_steps
    state = student.optimizer.optimizer.state[
        student.optimizer.optimizer.param_groups[0]["params"][0]
    ]
    moment = state["exp_avg"].clone()
    with torch.no_grad():
        first.fill_(float("inf"))
    report = session.train(plan, samples)
    unchanged = bool(first.isinf().all()) and torch.equal(moment, state["exp_avg"])
    with torch.no_grad():
        first.copy_(good)
    return report, unchanged and student.schedule.num_steps == steps, session.train(plan, samples)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}], ids=["single", "tensor-2"])
def test_step_that_is_not_finite_is_skipped_and_the_next_one_is_taken(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = [make_sample("only", lengths=(9,), seed=1)]
    for report, is_unchanged, after in run_ranks(
        train_after_poison, settings_for(model, **layout), make_plan(samples), by_id(samples)
    ):
        assert report.skipped
        assert is_unchanged
        assert not after.skipped


def test_payload_that_is_not_what_the_plan_says_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", kind="llama", tied=True)
    samples = [make_sample("short", lengths=(9,), seed=1)]
    others = [make_sample("short", lengths=(7,), seed=1)]
    with pytest.raises(AssertionError, match="TrainerError: segment 0 of sample 'short'"):
        run_ranks(train, settings_for(model), [make_plan(samples)], [by_id(others)])
