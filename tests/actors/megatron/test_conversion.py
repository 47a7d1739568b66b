# pyright: basic
"""Weights read from, and written to, Hugging Face's format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from opdkit.actors.weight_checksum import checksum_of
from tests.actors.megatron.micro import (
    VOCAB_SIZE,
    by_id,
    load_model,
    make_plan,
    make_sample,
    settings_for,
    write_model,
)
from tests.actors.megatron.ranks import run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

KINDS = [(kind, tied) for kind in ("llama", "qwen2", "qwen3") for tied in (True, False)]


def logits_and_export(session: Any, plan: Any, samples: Any, folder: str) -> Any:
    """Return this rank's logits of the plan's supervised positions, and write the weights."""
    from opdkit.actors.megatron.cpu_support import device_mode

    with device_mode(), torch.no_grad():
        logits = [session.student.model(batch) for batch in session._batches(plan, samples)]
    session.save_hf(folder)
    manifest = session.export(7)
    return torch.cat(logits).numpy(), manifest


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_model_computes_and_returns_what_transformers_wrote(
    tmp_path: Path, kind: str, tied: bool, tensor: int
) -> None:
    model = write_model(tmp_path / "model", kind=kind, tied=tied)
    samples = [make_sample(f"s{n}", lengths=(3 + n, 9), seed=n) for n in range(2)]
    results = run_ranks(
        logits_and_export,
        settings_for(model, tensor=tensor),
        make_plan(samples, per_microbatch=4),
        by_id(samples),
        str(tmp_path / "saved"),
    )
    logits = torch.cat([torch.tensor(rank[0]) for rank in results], dim=1)[:, :VOCAB_SIZE]
    reference = load_model(model)
    expected = []
    for sample in samples:
        for scored in sample.segments:
            ids = torch.frombuffer(bytearray(scored.segment.token_ids), dtype=torch.int32).long()
            mask = torch.tensor(list(scored.segment.loss_mask), dtype=torch.bool)
            with torch.no_grad():
                # One sequence at a time: packing must not let them see each other.
                expected.append(reference(ids[None]).logits[0, :-1][mask[1:]])
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)

    original = load_file(model / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    manifest = results[0][1]
    exported = load_file(manifest.location)
    assert checksum_of(exported.items()) == manifest.checksum
    assert Path(manifest.location).stat().st_size == manifest.num_bytes
    assert original.keys() == saved.keys() == exported.keys()
    assert all(torch.equal(original[name], saved[name]) for name in original)
    assert all(torch.equal(original[name], exported[name]) for name in original)
    again = load_model(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in reference.state_dict().items())
