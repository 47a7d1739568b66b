# pyright: basic
"""Student and teacher under Ray Serve: what arrives, what an update does, what a death costs."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from opdkit.actors.board_access import BoardAddress, WatchedBoard
from opdkit.actors.calls import call
from opdkit.actors.engines import ServeStudent, ServeTeacher
from opdkit.actors.serving import STUDENT, TEACHER, deploy, remove, student_part, teacher_part
from opdkit.protocols.config import LossSection, PlacementSection, StudentSection, TeacherSection
from opdkit.protocols.errors import PromptError, ReplicaLost, TeacherAlignmentError
from opdkit.protocols.messages import GenerateRequest, ScoreRequest, VersionSpan, WeightManifest
from tests.actors.conftest import NAMESPACE, RunReal
from tests.actors.micro_model import (
    VOCAB_SIZE,
    logprobs_of,
    make_micro_model,
    publishable,
    random_model,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

JOB = "serving-test"
BOARD = "serving-test-board"
TOP_K = 8
PROMPT = list(range(40, 60))
PLACEMENT = PlacementSection(num_cpus=0.5)
TOLERANCE = 1e-4
"""Nats; float32 against float32 by another order of summation."""


@dataclass
class Served:
    student: ServeStudent
    teacher: ServeTeacher
    board: Any
    folder: Path
    model: Any
    """What the teacher is, and the student at version 0."""


@pytest.fixture(scope="module")
def served(
    cluster: None, run_real: RunReal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serving")
    model = make_micro_model(folder / "model", seed=0, tied=False)
    board = ray.remote(WatchedBoard).options(name=BOARD, num_cpus=0).remote()

    async def start() -> Served:
        size = {
            "model": str(folder / "model"),
            "dtype": "float32",
            "max_num_seqs": 8,
            "kv_cache_mib": 32,
            "placement": PLACEMENT,
        }
        address = BoardAddress(actor_name=BOARD, namespace=NAMESPACE, control_s=30)
        student = StudentSection(max_model_len=512, **size)
        teacher = TeacherSection(max_model_len=513, **size)
        loss = LossSection(top_k=TOP_K)
        handles = await deploy(
            JOB,
            [
                student_part(student, seed=0, board=address),
                teacher_part(teacher, loss=loss, vocab_size=VOCAB_SIZE),
            ],
            deadline_s=240,
        )
        result = Served(
            student=ServeStudent(handles[STUDENT], generate_s=60, control_s=30),
            teacher=ServeTeacher(handles[TEACHER], score_s=60, control_s=30),
            board=board,
            folder=folder,
            model=model,
        )
        await _publish(result, model, version=0)
        return result

    yield run_real(start())
    run_real(remove(JOB, [STUDENT, TEACHER]))


async def _publish(served: Served, model: Any, *, version: int) -> WeightManifest:
    manifest = publishable(model, served.folder / f"v{version}.safetensors", version=version)
    await call(lambda: served.board.publish.remote(manifest), name="publish", deadline_s=60)
    return manifest


def _request(name: str, *, max_tokens: int = 24, temperature: float = 1.0) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        session_id=name,
        token_ids=np.asarray(PROMPT, "<i4").tobytes(),
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        seed=7,
    )


@dataclass
class Reply:
    token_ids: list[int]
    logprobs: np.ndarray
    spans: list[VersionSpan]
    finish_reason: str | None


async def _reply(student: ServeStudent, request: GenerateRequest) -> Reply:
    async with aclosing(student.generate(request)) as stream:
        chunks = [chunk async for chunk in stream]
    return Reply(
        token_ids=[i for c in chunks for i in np.frombuffer(c.token_ids, "<i4").tolist()],
        logprobs=np.concatenate([np.frombuffer(c.logprobs, "<f4") for c in chunks]),
        spans=[span for c in chunks for span in c.spans],
        finish_reason=chunks[-1].finish_reason,
    )


def _expected(model: Any, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    rows = logprobs_of(model, PROMPT + token_ids, temperature=temperature)
    first = len(PROMPT) - 1
    return rows[torch.arange(first, first + len(token_ids)), torch.tensor(token_ids)].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_reply_carries_the_logprobs_it_was_sampled_with(
    served: Served, run_real: RunReal, temperature: float
) -> None:
    reply = run_real(_reply(served.student, _request("reply", temperature=temperature)))
    expected = _expected(served.model, reply.token_ids, temperature)
    np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    assert {span.policy_version for span in reply.spans} == {0}


def test_a_history_without_room_is_refused_by_name(served: Served, run_real: RunReal) -> None:
    request = GenerateRequest(
        request_id="long",
        session_id="long",
        token_ids=np.zeros(512, "<i4").tobytes(),
        max_tokens=4,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        seed=None,
    )
    with pytest.raises(PromptError, match="512") as caught:
        run_real(_reply(served.student, request))
    assert type(caught.value) is PromptError


def test_the_teacher_scores_only_what_is_supervised(served: Served, run_real: RunReal) -> None:
    token_ids, positions = list(range(100, 140)), [1, 5, 6, 39]
    scores = run_real(
        served.teacher.score(
            ScoreRequest(
                sample_id="scored",
                token_ids=np.asarray(token_ids, "<i4").tobytes(),
                positions=np.asarray(positions, "<i4").tobytes(),
            )
        )
    )
    rows = logprobs_of(served.model, token_ids)[torch.tensor(positions) - 1]
    best = torch.topk(rows, TOP_K)
    ids = np.frombuffer(scores.token_ids, "<i4").reshape(len(positions), TOP_K)
    logprobs = np.frombuffer(scores.logprobs, "<f4").reshape(len(positions), TOP_K)
    np.testing.assert_array_equal(ids, best.indices.numpy())
    np.testing.assert_allclose(logprobs, best.values.numpy(), atol=TOLERANCE)
    sampled = rows[torch.arange(4), torch.tensor(token_ids)[positions]].numpy()
    np.testing.assert_allclose(
        np.frombuffer(scores.sampled_logprobs, "<f4"), sampled, atol=TOLERANCE
    )
    tail = 1 - best.values.exp().sum(dim=1).numpy()
    np.testing.assert_allclose(np.frombuffer(scores.tail_mass, "<f4"), tail, atol=TOLERANCE)


def test_positions_outside_the_sequence_are_refused_by_name(
    served: Served, run_real: RunReal
) -> None:
    request = ScoreRequest(
        sample_id="outside",
        token_ids=np.asarray([1, 2, 3], "<i4").tobytes(),
        positions=np.asarray([3], "<i4").tobytes(),
    )
    with pytest.raises(TeacherAlignmentError, match="outside"):
        run_real(served.teacher.score(request))


def test_leaving_a_stream_frees_the_engines_request(served: Served, run_real: RunReal) -> None:
    async def leave_early() -> int:
        async with aclosing(served.student.generate(_request("left", max_tokens=480))) as stream:
            async for _ in stream:
                break
        # Both go the same way in order, so this one is answered after the cancellation arrived.
        await _reply(served.student, _request("left", max_tokens=1))
        [stats] = await served.student.stats()
        return stats.num_unfinished

    assert run_real(leave_early()) == 0


def test_new_weights_reach_sequences_in_flight(served: Served, run_real: RunReal) -> None:
    newer = random_model(served.model.config, seed=1)

    async def update_in_flight() -> list[Reply]:
        async with asyncio.TaskGroup() as group:
            replies = [
                group.create_task(_reply(served.student, _request(f"flight-{n}", max_tokens=300)))
                for n in range(8)
            ]
            await _publish(served, newer, version=1)
        return [reply.result() for reply in replies]

    replies = run_real(update_in_flight())
    assert [len(reply.token_ids) for reply in replies] == [300] * 8
    assert all(reply.spans[-1].policy_version == 1 for reply in replies)
    after = run_real(_reply(served.student, _request("after")))
    np.testing.assert_allclose(after.logprobs, _expected(newer, after.token_ids), atol=TOLERANCE)
    assert {span.policy_version for span in after.spans} == {1}


def test_a_killed_replica_is_replaced_by_one_on_the_current_weights(
    served: Served, run_real: RunReal
) -> None:
    newer = random_model(served.model.config, seed=2)

    async def kill_in_flight() -> tuple[list[psutil.Process], Reply]:
        stream = served.student.generate(_request("killed", max_tokens=480))
        async with aclosing(stream):
            await anext(stream)
            family = _replica_processes()
            os.kill(family[0].pid, signal.SIGKILL)
            with pytest.raises(ReplicaLost):
                async for _ in stream:
                    pass
        # The board has heard of the death and does not wait for the dead.
        await _publish(served, newer, version=2)
        return family, await _reply(served.student, _request("replaced"))

    family, reply = run_real(kill_in_flight())
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    np.testing.assert_allclose(reply.logprobs, _expected(newer, reply.token_ids), atol=TOLERANCE)
    assert {span.policy_version for span in reply.spans} == {2}


def _replica_processes() -> list[psutil.Process]:
    """Return the student's replica and, after it, the processes it started."""
    [replica] = [
        process
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica" in process.name() or "ServeReplica" in " ".join(process.cmdline()[:1])
        if STUDENT in " ".join(process.cmdline())
    ]
    return [replica, *replica.children(recursive=True)]
