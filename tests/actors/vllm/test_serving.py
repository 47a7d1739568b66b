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
import psutil  # type: ignore[import-untyped]
import pytest
import ray
import torch

from opdkit.actors.board_access import BoardAddress, WatchedBoard
from opdkit.actors.calls import call
from opdkit.actors.engines import ServeStudent, ServeTeacher
from opdkit.actors.serving import (
    STUDENT,
    TEACHER,
    deploy,
    remove,
    student_part,
    teacher_part,
)
from opdkit.protocols.config import LossSection, PlacementSection, StudentSection, TeacherSection
from opdkit.protocols.errors import PromptError, ReplicaLost, TeacherAlignmentError
from opdkit.protocols.messages import ScoreRequest, WeightManifest
from tests.actors.conftest import NAMESPACE, RunReal
from tests.actors.micro_model import (
    VOCAB_SIZE,
    logprobs_of,
    make_micro_model,
    publishable,
    random_model,
)
from tests.actors.vllm.replies import TOLERANCE, Reply, collect, request, sampled_logprobs

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

JOB = "serving-test"
BOARD = "serving-test-board"
TOP_K = 8


@dataclass
class Served:
    """One job's deployments."""

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
    size: dict[str, Any] = {
        "model": str(folder / "model"),
        "dtype": "float32",
        "max_num_seqs": 8,
        "kv_cache_mib": 32,
        "placement": PlacementSection(num_cpus=0.5),
    }
    student = StudentSection(max_model_len=512, **size)
    teacher = TeacherSection(max_model_len=513, **size)

    async def start() -> Served:
        address = BoardAddress(actor_name=BOARD, namespace=NAMESPACE, control_s=30)
        handles = await deploy(
            JOB,
            [
                student_part(student, seed=0, board=address),
                teacher_part(teacher, loss=LossSection(top_k=TOP_K), vocab_size=VOCAB_SIZE),
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
        await publish(result, model, version=0)
        return result

    yield run_real(start())
    run_real(remove(JOB, [STUDENT, TEACHER]))


async def publish(served: Served, model: Any, *, version: int) -> WeightManifest:
    manifest = publishable(model, served.folder / f"v{version}.safetensors", version=version)
    await call(lambda: served.board.publish.remote(manifest), name="publish", deadline_s=60)
    return manifest


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_reply_carries_the_logprobs_it_was_sampled_with(
    served: Served, run_real: RunReal, temperature: float
) -> None:
    stream = served.student.generate(request("reply", temperature=temperature))
    reply = run_real(collect(stream))
    expected = sampled_logprobs(served.model, reply.token_ids, temperature=temperature)
    np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    assert {span.policy_version for span in reply.spans} == {0}


def test_a_history_without_room_is_refused_by_name(served: Served, run_real: RunReal) -> None:
    stream = served.student.generate(request("long", prompt=[5] * 512))
    with pytest.raises(PromptError, match="512") as caught:
        run_real(collect(stream))
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
    outside = ScoreRequest(
        sample_id="outside",
        token_ids=np.asarray([1, 2, 3], "<i4").tobytes(),
        positions=np.asarray([3], "<i4").tobytes(),
    )
    with pytest.raises(TeacherAlignmentError, match="outside"):
        run_real(served.teacher.score(outside))


def test_leaving_a_stream_frees_the_engines_request(served: Served, run_real: RunReal) -> None:
    async def leave_early() -> int:
        async with aclosing(served.student.generate(request("left", max_tokens=480))) as stream:
            await anext(stream)
        # It runs beside the one that was left, unless that one is gone: 8 tokens take a while.
        await collect(served.student.generate(request("left", max_tokens=8)))
        [stats] = await served.student.stats()
        return stats.num_unfinished

    assert run_real(leave_early()) == 0


def test_new_weights_reach_sequences_in_flight(served: Served, run_real: RunReal) -> None:
    newer = random_model(served.model.config, seed=1)

    async def update_in_flight() -> list[Reply]:
        manifest = publishable(newer, served.folder / "v1.safetensors", version=1)
        streams = [
            served.student.generate(request(f"flight-{n}", max_tokens=480)) for n in range(8)
        ]
        for stream in streams:
            await anext(stream)
        async with asyncio.TaskGroup() as group:
            replies = [group.create_task(collect(stream)) for stream in streams]
            await call(lambda: served.board.publish.remote(manifest), name="publish", deadline_s=60)
        return [reply.result() for reply in replies]

    replies = run_real(update_in_flight())
    for reply in replies:
        versions = [span.policy_version for span in reply.spans]
        assert versions == sorted(versions)
        assert sum(span.num_tokens for span in reply.spans) == len(reply.token_ids)
        assert reply.finish_reason in {"length", "stop"}  # a random model may end by itself
    assert any({0, 1} == {span.policy_version for span in reply.spans} for reply in replies)
    after = run_real(collect(served.student.generate(request("after"))))
    expected = sampled_logprobs(newer, after.token_ids)
    np.testing.assert_allclose(after.logprobs, expected, atol=TOLERANCE)
    assert {span.policy_version for span in after.spans} == {1}


def test_a_killed_replica_is_replaced_by_one_on_the_current_weights(
    served: Served, run_real: RunReal
) -> None:
    newer = random_model(served.model.config, seed=2)

    async def kill_in_flight() -> tuple[list[psutil.Process], Reply]:
        async with aclosing(served.student.generate(request("killed", max_tokens=480))) as stream:
            await anext(stream)
            family = replica_processes()
            os.kill(family[0].pid, signal.SIGKILL)
            with pytest.raises(ReplicaLost):
                async for _ in stream:
                    pass
        # The board has heard of the death and does not wait for the dead.
        await publish(served, newer, version=2)
        return family, await collect(served.student.generate(request("replaced")))

    family, reply = run_real(kill_in_flight())
    _, alive = psutil.wait_procs(family, timeout=20)
    assert len(family) > 1, "the engine's process was not found"
    assert not alive
    expected = sampled_logprobs(newer, reply.token_ids)
    np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    assert {span.policy_version for span in reply.spans} == {2}


def replica_processes() -> list[psutil.Process]:
    """Return the student's replica and, after it, the processes that it started."""
    title = f"ServeReplica:{JOB}-{STUDENT}:{STUDENT}"
    [replica] = [
        process
        for process in psutil.Process().children(recursive=True)
        if title in " ".join(process.cmdline())
    ]
    return [replica, *replica.children(recursive=True)]
