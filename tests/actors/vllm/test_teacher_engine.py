# pyright: basic
"""One engine of a teacher that returns its full vocabulary, and its best k, of a few sequences."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from opdkit.protocols.config import LossSection, TeacherSection
from opdkit.protocols.errors import ConfigError, PromptError, ReplicaLost
from opdkit.protocols.messages import ScoreRequest, TeacherScores
from tests.actors.conftest import RunReal
from tests.actors.micro_model import VOCAB_SIZE, logprobs_of, make_micro_model
from tests.actors.vllm.replies import TOLERANCE

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    # What vLLM does at its import.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

SECTION = TeacherSection(
    model="unset", dtype="float32", max_model_len=129, max_num_seqs=4, kv_cache_mib=16
)
FULL = LossSection(support="full", tail="renormalize")


class Fixture:
    """A running engine, asked for its full vocabulary."""

    def __init__(self, folder: Path, run_real: RunReal) -> None:
        import msgspec

        from opdkit.actors.vllm.engine_process import start_engine
        from opdkit.actors.vllm.engine_settings import teacher_arguments

        self.model = make_micro_model(folder, seed=0, tied=False)
        self.section = msgspec.structs.replace(SECTION, model=str(folder))
        self.engine = run_real(start_engine(partial(teacher_arguments, self.section, loss=FULL)))

    def teacher(self, loss: LossSection, *, vocab_size: int = VOCAB_SIZE) -> Any:
        """Return a scorer over the same engine."""
        from opdkit.actors.vllm.teacher_engine import TeacherEngine

        return TeacherEngine(self.engine, section=self.section, loss=loss, vocab_size=vocab_size)


@pytest.fixture(scope="module")
def running(
    vllm_environment: None, run_real: RunReal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fixture]:
    fixture = Fixture(tmp_path_factory.mktemp("teacher"), run_real)
    yield fixture

    async def stop() -> None:
        fixture.teacher(FULL).stop()

    run_real(stop())


def request(name: str, token_ids: list[int], positions: list[int]) -> ScoreRequest:
    return ScoreRequest(
        sample_id=name,
        token_ids=np.asarray(token_ids, "<i4").tobytes(),
        positions=np.asarray(positions, "<i4").tobytes(),
    )


def cells(scores: TeacherScores) -> torch.Tensor:
    flat = np.frombuffer(scores.logprobs, "<f4")
    return torch.tensor(flat.reshape(scores.num_positions, scores.support_size))


def test_the_full_distribution_equals_transformers(running: Fixture, run_real: RunReal) -> None:
    token_ids, positions = list(range(50, 90)), list(range(10, 40))
    scores = run_real(running.teacher(FULL).score(request("full", token_ids, positions)))
    expected = logprobs_of(running.model, token_ids)[torch.tensor(positions) - 1]
    torch.testing.assert_close(cells(scores), expected, atol=TOLERANCE, rtol=0)
    assert scores.token_ids == b""
    assert scores.support_size == VOCAB_SIZE


def test_a_smaller_shared_vocabulary_is_a_distribution_too(
    running: Fixture, run_real: RunReal
) -> None:
    token_ids = list(range(50, 90))
    teacher = running.teacher(FULL, vocab_size=VOCAB_SIZE - 64)
    scores = run_real(teacher.score(request("sliced", token_ids, [5, 20])))
    torch.testing.assert_close(cells(scores).exp().sum(dim=1), torch.ones(2), atol=1e-4, rtol=0)


def test_many_sequences_at_once_are_scored_each_as_alone(
    running: Fixture, run_real: RunReal
) -> None:
    """Longer than a prefill chunk together, and the same ids twice (vllm#8268)."""
    teacher = running.teacher(LossSection(top_k=4))
    sequences = [[30 + (n * i) % 200 for i in range(100)] for n in (3, 3, 7, 11, 13, 17)]

    async def score_all() -> list[TeacherScores]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(teacher.score(request(f"s{n}", ids, list(range(1, 100)))))
                for n, ids in enumerate(sequences)
            ]
        return [task.result() for task in tasks]

    scored = run_real(score_all())
    assert scored[0] == scored[1]
    for ids, scores in zip(sequences, scored, strict=True):
        best = torch.topk(logprobs_of(running.model, ids)[:-1], 4).values
        torch.testing.assert_close(cells(scores), best, atol=TOLERANCE, rtol=0)


def test_a_cancelled_call_frees_the_engines_request(running: Fixture, run_real: RunReal) -> None:
    teacher = running.teacher(LossSection(top_k=4))

    async def cancel() -> int:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(teacher.score(request("gone", [5] * 128, [1])))
            await asyncio.sleep(0)
            assert running.engine.get_num_unfinished_requests() == 1
            task.cancel()
        return int(running.engine.get_num_unfinished_requests())

    assert run_real(cancel()) == 0


def test_what_cannot_be_scored_is_refused_by_name(running: Fixture, run_real: RunReal) -> None:
    teacher = running.teacher(FULL)
    with pytest.raises(PromptError, match=r"sample long has 129 tokens, but scoring needs 2 … 128"):
        run_real(teacher.score(request("long", [5] * 129, [1])))
    with pytest.raises(PromptError, match="id 320 at position 1"):
        run_real(teacher.score(request("foreign", [5, VOCAB_SIZE], [1])))


def test_more_tokens_than_the_vocabulary_has_are_refused(
    running: Fixture, run_real: RunReal
) -> None:
    from opdkit.actors.vllm.teacher_engine import TeacherEngine

    loss = LossSection(top_k=VOCAB_SIZE + 1)
    with pytest.raises(ConfigError, match="top_k is 321, but must be at most the vocabulary, 320"):
        run_real(TeacherEngine.start(running.section, loss=loss, vocab_size=VOCAB_SIZE))


def test_the_death_of_the_engines_process_is_a_loss(running: Fixture, run_real: RunReal) -> None:
    """The last test of this engine."""
    teacher = running.teacher(FULL)

    async def kill() -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(lost(teacher))
            await asyncio.sleep(0)
            for process in psutil.Process().children():
                if "EngineCore" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
            await task
        with pytest.raises(ReplicaLost):
            await teacher.check_health()

    async def lost(teacher: Any) -> None:
        with pytest.raises(ReplicaLost, match="sample dying"):
            await teacher.score(request("dying", [5] * 128, [1]))

    run_real(kill())
