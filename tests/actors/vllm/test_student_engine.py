# pyright: basic
"""One engine of a student whose output layer is tied to its embedding: updates, good and bad."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from opdkit.actors.weight_checksum import checksum_of
from opdkit.protocols.config import StudentSection
from opdkit.protocols.errors import PromptError, WeightUpdateError
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import WeightManifest
from tests.actors.conftest import RunReal
from tests.actors.micro_model import (
    VOCAB_SIZE,
    logprobs_of,
    make_micro_model,
    publishable,
    random_model,
)
from tests.actors.vllm.replies import PROMPT, TOLERANCE, Reply, collect, request, sampled_logprobs

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    # What vLLM does at its import.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

LONG_PROMPT = [20 + (7 * n) % 250 for n in range(300)]
"""More than two blocks of the prefix cache (128 tokens on a CPU)."""


@dataclass
class Fixture:
    """A running engine, which serves ``model``."""

    engine: Any
    model: Any
    manifest: WeightManifest
    folder: Path


@pytest.fixture(scope="module")
def tied(
    vllm_environment: None, run_real: RunReal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fixture]:
    folder = tmp_path_factory.mktemp("tied")
    model = make_micro_model(folder / "model", seed=0, tied=True)
    section = StudentSection(
        model=str(folder / "model"),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=2,
        kv_cache_mib=32,
    )
    from opdkit.actors.vllm.student_engine import StudentEngine

    engine = run_real(StudentEngine.start(section, seed=0))
    manifest = publishable(model, folder / "v0.safetensors", version=0)
    run_real(engine.apply(manifest))
    yield Fixture(engine=engine, model=model, manifest=manifest, folder=folder)

    async def stop() -> None:
        engine.stop()

    run_real(stop())


def probe_error(tied: Fixture, run_real: RunReal, model: Any) -> float:
    """Return how far the engine is from a model on a fixed sequence, in nats."""
    found = run_real(tied.engine.probe(np.asarray(PROMPT, "<i4").tobytes()))
    rows = logprobs_of(model, PROMPT)
    expected = rows[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].numpy()
    return float(np.abs(found - expected).max())


def test_a_stream_comes_in_chunks_and_says_why_it_ended(tied: Fixture, run_real: RunReal) -> None:
    reply = run_real(collect(tied.engine.generate(request("chunks", max_tokens=40))))
    assert (len(reply.token_ids), reply.num_chunks, reply.finish_reason) == (40, 4, "length")


def test_ids_that_the_model_does_not_have_cost_their_request_only(
    tied: Fixture, run_real: RunReal
) -> None:
    for wrong in (VOCAB_SIZE, -1):
        with pytest.raises(PromptError, match=f"id {wrong} at position 1"):
            run_real(collect(tied.engine.generate(request("foreign", prompt=[5, wrong]))))
    run_real(tied.engine.check_health())


def test_the_reply_is_cut_where_the_context_ends(tied: Fixture, run_real: RunReal) -> None:
    reply = run_real(collect(tied.engine.generate(request("cut", prompt=[7] * 508))))
    assert len(reply.token_ids) == 4


def test_a_stop_token_ends_a_reply_and_is_kept(tied: Fixture, run_real: RunReal) -> None:
    first = run_real(collect(tied.engine.generate(request("any", max_tokens=8))))
    stop = first.token_ids[3]
    stopping = msgspec.structs.replace(request("stop", max_tokens=8), stop_token_ids=(stop,))
    reply = run_real(collect(tied.engine.generate(stopping)))
    end = first.token_ids.index(stop) + 1
    assert (reply.token_ids, reply.finish_reason) == (first.token_ids[:end], "stop")


def test_the_models_own_end_of_sequence_stops_a_reply(tied: Fixture, run_real: RunReal) -> None:
    eager = random_model(tied.model.config, seed=6)
    with torch.no_grad():
        # After the prompt, the output layer's row of this id gives by far the largest logit.
        state = eager.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
        eager.model.embed_tokens.weight[eager.config.eos_token_id] = 10 * state
    run_real(tied.engine.apply(publishable(eager, tied.folder / "e.safetensors", version=6)))
    reply = run_real(collect(tied.engine.generate(request("eos"))))
    assert (reply.token_ids, reply.finish_reason) == ([eager.config.eos_token_id], "stop")
    run_real(tied.engine.apply(tied.manifest))


def wrong_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.nonsense.weight"] = tensors.pop("model.norm.weight")


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(3, 3)


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.self_attn.k_proj.weight"]


def corrupted(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] += 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (wrong_name, "1 tensors are missing, the first is model.norm.weight"),
        (wrong_shape, "down_proj.weight has shape"),
        (missing, "1 tensors are missing, the first is model.layers.0.self_attn.k_proj"),
        (corrupted, "checksum"),
    ],
)
def test_weights_that_do_not_fit_leave_the_old_ones(
    tied: Fixture,
    run_real: RunReal,
    spoil: Callable[[dict[str, torch.Tensor]], None],
    reason: str,
) -> None:
    newer = random_model(tied.model.config, seed=9)
    good = publishable(newer, tied.folder / "good.safetensors", version=9)
    tensors = load_file(good.location)
    spoil(tensors)
    path = tied.folder / "spoilt.safetensors"
    save_file(tensors, path)
    checksum = good.checksum if spoil is corrupted else checksum_of(tensors.items())
    spoilt = msgspec.structs.replace(good, location=str(path), checksum=checksum)
    with pytest.raises(WeightUpdateError, match=reason):
        run_real(tied.engine.apply(spoilt))
    assert tied.engine.served == tied.manifest
    assert probe_error(tied, run_real, tied.model) < TOLERANCE


def test_a_file_that_is_not_there_or_no_safetensors_leaves_the_old_weights(
    tied: Fixture, run_real: RunReal
) -> None:
    noise = tied.folder / "noise.safetensors"
    noise.write_bytes(b"\xff" * 64)
    for path in (tied.folder / "absent.safetensors", noise):
        gone = msgspec.structs.replace(tied.manifest, location=str(path), policy_version=8)
        with pytest.raises(WeightUpdateError, match=path.name):
            run_real(tied.engine.apply(gone))
    reply = run_real(collect(tied.engine.generate(request("still"))))
    assert {span.policy_version for span in reply.spans} == {0}
    assert probe_error(tied, run_real, tied.model) < TOLERANCE


def test_an_update_reaches_the_tied_output_layer(tied: Fixture, run_real: RunReal) -> None:
    newer = random_model(tied.model.config, seed=3)
    manifest = publishable(newer, tied.folder / "tied.safetensors", version=1)
    assert run_real(tied.engine.apply(manifest)) == manifest.checksum
    assert probe_error(tied, run_real, newer) < TOLERANCE
    run_real(tied.engine.apply(tied.manifest))
    assert probe_error(tied, run_real, tied.model) < TOLERANCE


def test_no_prefix_of_older_weights_is_used(tied: Fixture, run_real: RunReal) -> None:
    def cached_by(name: str) -> tuple[int, Reply]:
        before = tied.engine.stats().num_cached_tokens
        reply = run_real(collect(tied.engine.generate(request(name, prompt=LONG_PROMPT))))
        return tied.engine.stats().num_cached_tokens - before, reply

    cached_by("fill")
    assert cached_by("same version")[0] > 0
    newer = random_model(tied.model.config, seed=4)
    run_real(tied.engine.apply(publishable(newer, tied.folder / "p.safetensors", version=2)))
    num_cached, reply = cached_by("newer version")
    assert num_cached == 0
    expected = sampled_logprobs(newer, reply.token_ids, prompt=LONG_PROMPT)
    np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    run_real(tied.engine.apply(tied.manifest))


def test_requests_that_wait_in_the_engine_begin_with_the_newer_weights(
    tied: Fixture, run_real: RunReal
) -> None:
    """Two run at once: the others have been sent, but have no token when the update comes."""
    run_real(collect(tied.engine.generate(request("fill", prompt=LONG_PROMPT))))
    newer = random_model(tied.model.config, seed=5)
    manifest = publishable(newer, tied.folder / "w.safetensors", version=3)

    async def update_over_a_full_engine() -> list[Reply]:
        streams = [
            tied.engine.generate(request(f"full-{n}", prompt=LONG_PROMPT, max_tokens=100))
            for n in range(4)
        ]
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(anext(stream)) for stream in streams[:2]]
            for first in running:
                await first
            waiting = [group.create_task(collect(stream)) for stream in streams[2:]]
            await asyncio.sleep(0)
            await tied.engine.apply(manifest)
            replies = [group.create_task(collect(stream)) for stream in streams[:2]]
        return [task.result() for task in [*replies, *waiting]]

    replies = run_real(update_over_a_full_engine())
    assert [{span.policy_version for span in reply.spans} for reply in replies[2:]] == [{3}, {3}]
    for reply in replies[2:]:
        expected = sampled_logprobs(newer, reply.token_ids, prompt=LONG_PROMPT)
        np.testing.assert_allclose(reply.logprobs, expected, atol=TOLERANCE)
    for reply in replies[:2]:
        assert reply.spans[-1].policy_version == PolicyVersion(3)
    run_real(tied.engine.apply(tied.manifest))


def test_closing_and_cancelling_free_the_engines_requests(tied: Fixture, run_real: RunReal) -> None:
    async def leave() -> int:
        async with aclosing(tied.engine.generate(request("closed", max_tokens=400))) as stream:
            await anext(stream)
        async with asyncio.TaskGroup() as group:
            stream = tied.engine.generate(request("cancelled", max_tokens=400))
            await anext(stream)
            task = group.create_task(collect(stream))
            await asyncio.sleep(0)
            task.cancel()
        return int(tied.engine.stats().num_unfinished)

    assert run_real(leave()) == 0
