# pyright: basic
"""Whether every score belongs to its position: a student that is its own teacher has no loss.

Real engines of the exported student in both roles, real rollouts, the payloads that they put into
the queue, and the trainer's own loss on them.
"""

import asyncio
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import uvloop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opdkit.actors.chat_template import TokenizerTemplate
from opdkit.actors.files.model_files import read_model
from opdkit.actors.models.micro import VOCAB_SIZE
from opdkit.actors.ray_environment import engine_environment
from opdkit.actors.weight_checksum import checksum_of
from opdkit.engine.clocks import MonotonicClock
from opdkit.engine.rollouts import Rollouts
from opdkit.engine.scheduling import make_scheduler
from opdkit.engine.testing import RecordingQueue
from opdkit.protocols.config import (
    LossSection,
    PlacementSection,
    RolloutSection,
    StudentSection,
    TeacherSection,
)
from opdkit.protocols.ids import Ordinal, PolicyVersion
from opdkit.protocols.messages import (
    RolloutTask,
    Sample,
    ScoredSegment,
    StepReport,
    WeightManifest,
)
from tests.actors.megatron.micro import by_id, make_plan, settings_for
from tests.actors.megatron.ranks import run_ranks
from tests.integration.conftest import Finished
from tests.integration.jobs import PROMPTS

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    # What vLLM does at its import.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

MAX_MODEL_LEN = 128
SCHEDULERS = ("single_turn", "math_tips")
TEACHERS = {"top_k": LossSection(top_k=64), "full": LossSection(support="full")}
LOSSES = {
    "reverse, top k": LossSection(divergence="reverse_kl", top_k=64),
    "forward, top k": LossSection(divergence="forward_kl", top_k=64),
    "reverse, full": LossSection(divergence="reverse_kl", support="full"),
    "forward, full": LossSection(divergence="forward_kl", support="full"),
}

Recorded = dict[tuple[str, str], RecordingQueue]
"""By scheduler and support."""


@pytest.fixture(scope="module")
def recorded(finished: Finished) -> Recorded:
    """Seven samples of each scheduler, scored in each way."""
    variables = engine_environment(PlacementSection(), is_eager=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for name, value in {**variables, "PYTHONPATH": os.pathsep.join(sys.path)}.items():
            patch.setenv(name, value)
        return runner.run(_record(finished.directory / "export"))


async def _record(model: Path) -> Recorded:
    # vLLM reads the environment when it is imported.
    from opdkit.actors.vllm.student_engine import StudentEngine
    from opdkit.actors.vllm.teacher_engine import TeacherEngine

    size: dict[str, Any] = {"model": str(model), "dtype": "float32", "kv_cache_mib": 32}
    student = await StudentEngine.start(StudentSection(max_model_len=MAX_MODEL_LEN, **size), seed=0)
    section = TeacherSection(max_model_len=MAX_MODEL_LEN + 1, **size)
    teachers = {
        support: await TeacherEngine.start(section, loss=loss, vocab_size=VOCAB_SIZE)
        for support, loss in TEACHERS.items()
    }
    await student.apply(_manifest(model))
    recorded = {(name, support): RecordingQueue() for name in SCHEDULERS for support in TEACHERS}
    for (name, support), queue in recorded.items():
        rollouts = Rollouts(
            student=student,
            teacher=teachers[support],
            template=TokenizerTemplate(
                read_model(str(model), field="student.model"), field="student.model"
            ),
            train_queue=queue,
            evaluation_queue=queue,
            scheduler=make_scheduler(name, {}),
            settings=RolloutSection(max_new_tokens=12, max_turns=2),
            max_model_len=MAX_MODEL_LEN,
            clock=MonotonicClock(),
        )
        async with asyncio.TaskGroup() as group:
            for index in range(7):
                group.create_task(rollouts.run(_task(index)), name=f"rollout-{index}")
    student.stop()
    for teacher in teachers.values():
        teacher.stop()
    return recorded


def _task(index: int) -> RolloutTask:
    prompt = PROMPTS[index % len(PROMPTS)]
    return RolloutTask(
        sample_id=f"sample-{index}",
        ordinal=Ordinal(index),
        due_step=0,
        prompt_id=f"train.jsonl:{index + 1}",
        row={"messages": [{"role": "user", "content": prompt}], "solution": "42"},
        seed=index,
    )


def _manifest(model: Path) -> WeightManifest:
    path = model / "model.safetensors"
    return WeightManifest(
        policy_version=PolicyVersion(0),
        location=str(path),
        num_bytes=path.stat().st_size,
        checksum=checksum_of(load_file(path).items()),
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_student_that_is_its_own_teacher_has_no_loss(
    finished: Finished, recorded: Recorded, scheduler: str, name: str
) -> None:
    loss = LOSSES[name]
    queue = recorded[scheduler, loss.support]
    report = _report(finished, queue.samples, loss)
    assert abs(report.loss) < 1e-3
    assert report.num_supervised == sum(meta.num_generated_tokens for meta in queue.metas)
    assert report.num_uncovered == 0
    assert report.sampler_gap < 1e-3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", LOSSES)
def test_scores_that_are_one_position_off_show(
    finished: Finished, recorded: Recorded, scheduler: str, name: str
) -> None:
    loss = LOSSES[name]
    shifted = [
        msgspec.structs.replace(sample, segments=tuple(map(_shifted, sample.segments)))
        for sample in recorded[scheduler, loss.support].samples
    ]
    assert _report(finished, shifted, loss).loss > 0.1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_export_in_transformers_gives_the_engines_logprobs(
    finished: Finished, recorded: Recorded, scheduler: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(finished.directory / "export")
    assert model.dtype == torch.float32
    for sample in recorded[scheduler, "full"].samples:
        for scored in sample.segments:
            segment = scored.segment
            token_ids = torch.frombuffer(bytearray(segment.token_ids), dtype=torch.int32).long()
            sampled = np.flatnonzero(np.frombuffer(segment.loss_mask, np.uint8))
            with torch.no_grad():
                rows = model(token_ids[None]).logits[0].log_softmax(-1)
            expected = rows[sampled - 1, token_ids[sampled]].numpy()
            reported = np.frombuffer(segment.sampler_logprobs, "<f4")[sampled]
            np.testing.assert_allclose(reported, expected, atol=1e-3)


def test_some_trajectories_have_two_turns(recorded: Recorded) -> None:
    assert {meta.num_turns for meta in recorded["single_turn", "full"].metas} == {1}
    assert 2 in {meta.num_turns for meta in recorded["math_tips", "full"].metas}


def _report(finished: Finished, samples: Sequence[Sample], loss: LossSection) -> StepReport:
    settings = settings_for(
        finished.directory / "export",
        num_vocab=VOCAB_SIZE,
        max_sequence_tokens=MAX_MODEL_LEN,
        loss=loss,
    )
    report: StepReport
    [report] = run_ranks(_train, settings, list(samples))
    return report


def _train(session: Any, samples: list[Sample]) -> StepReport:
    report: StepReport = session.train(make_plan(samples), by_id(samples))
    return report


def _shifted(scored: ScoredSegment) -> ScoredSegment:
    """Give each position the scores of the one before it."""
    scores = scored.scores
    fields = ("token_ids", "logprobs", "sampled_logprobs", "tail_mass")
    rolled = {}
    for field in fields:
        data: bytes = getattr(scores, field)
        row = len(data) // scores.num_positions
        rolled[field] = data[-row:] + data[:-row] if row else b""
    return msgspec.structs.replace(scored, scores=msgspec.structs.replace(scores, **rolled))
