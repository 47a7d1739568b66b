"""The measure by which layers are chosen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from opdkit.actors.models.layer_ranking import (
    Reply,
    greedy_replies,
    logprob_chunks,
    mean_kl,
    only_layers,
    rank_blocks,
    rank_layers,
)
from opdkit.actors.models.micro import make_micro_model
from opdkit.actors.models.pruning import prune_layers
from tests.actors.models.loading import load_model, load_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Any:
    make_micro_model(tmp_path / "model", num_layers=4)
    return load_model(tmp_path / "model")


REPLIES = [
    Reply(token_ids=[1, 40, 41, 42, 43, 44], num_prompt_tokens=2),
    Reply(token_ids=[1, 50, 51, 52], num_prompt_tokens=3),
]


def test_a_layer_that_does_nothing_is_left_out_first(model: Any) -> None:
    idle = model.model.layers[2]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    first, second = rank_layers(model, REPLIES, num_drops=2)
    assert first.layer == 2
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert second.kl > 0.01
    assert len(model.model.layers) == 4


def test_a_block_that_does_nothing_is_missed_least(model: Any) -> None:
    with torch.no_grad():
        for idle in model.model.layers[1:3]:
            idle.self_attn.o_proj.weight.zero_()
            idle.mlp.down_proj.weight.zero_()
    first, *others = rank_blocks(model, REPLIES, num_layers=2)
    assert first.layer == 1
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert {drop.layer for drop in others} == {0, 2}


def test_only_reply_tokens_are_compared_whatever_the_padding(model: Any) -> None:
    together = torch.cat(logprob_chunks(model, REPLIES))
    alone = torch.cat([torch.cat(logprob_chunks(model, [reply])) for reply in REPLIES])
    assert together.shape == (5, model.config.vocab_size)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_a_model_without_layers_is_the_pruned_model(model: Any, tmp_path: Path) -> None:
    prune_layers(tmp_path / "model", tmp_path / "pruned", keep=(0, 3))
    pruned = load_model(tmp_path / "pruned")
    with only_layers(model, (0, 3)):
        ours = logprob_chunks(model, REPLIES)
    assert mean_kl(logprob_chunks(pruned, REPLIES), ours) == pytest.approx(0.0, abs=1e-6)


def test_the_divergence_is_that_of_the_definition() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    expected = float((p.double() * (p.double() / q.double()).log()).sum())
    assert mean_kl([p.log()[None]], [q.log()[None]]) == pytest.approx(expected)


def test_replies_continue_the_prompt_greedily(model: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path / "model")
    conversation = [{"role": "user", "content": "What is the sun?"}]
    (reply,) = greedy_replies(model, tokenizer, [conversation], max_new_tokens=3)
    assert reply.num_prompt_tokens == len(reply.token_ids) - 3
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([reply.token_ids])).logits[0]
    assert logits.argmax(-1)[-4:-1].tolist() == reply.token_ids[-3:]
