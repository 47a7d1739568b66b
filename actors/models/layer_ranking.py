# pyright: basic
# transformers types its models loosely.
"""How much each layer matters: the divergence from the whole model when it is left out.

Greedy search: of the layers still there, leave out the one whose absence costs least, and
repeat. The measure is KL(whole || pruned) per token over the full vocabulary, on the whole
model's own greedy replies (as in "Compact Language Models via Pruning and Knowledge
Distillation", Muralidharan et al. 2024, who use the loss; block-wise dropping:
"The Unreasonable Ineffectiveness of the Deeper Layers", Gromov et al. 2024).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

TOKENS_PER_CHUNK = 256
"""Rows of logits made at once: small enough to stay near the processor."""


class LayerDrop(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to leave a layer out, or the block that begins with it."""

    layer: int
    """Index in the whole model."""
    kl: float
    """Nats per token from the whole model; in a greedy search, with all earlier drops."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with the reply on which the models are compared."""

    token_ids: list[int]
    num_prompt_tokens: int


def greedy_replies(
    model: Any, tokenizer: Any, conversations: Sequence[Any], *, max_new_tokens: int
) -> list[Reply]:
    """Let the model answer each conversation greedily.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer, with a chat template.
        conversations: Messages of each.
        max_new_tokens: Longest reply.
    """
    replies = []
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
        num_prompt_tokens = prompt["input_ids"].shape[1]
        replies.append(Reply(token_ids=output[0].tolist(), num_prompt_tokens=num_prompt_tokens))
    return replies


def rank_layers(model: Any, replies: Sequence[Reply], *, num_drops: int) -> list[LayerDrop]:
    """Order layers by how little they are missed, best to leave out first.

    Args:
        model: A causal language model of transformers whose layers are ``model.model.layers``.
        replies: What the models are compared on.
        num_drops: Layers to leave out; fewer than the model has.
    """
    layers = list(range(len(model.model.layers)))
    whole = logprob_chunks(model, replies)
    drops: list[LayerDrop] = []
    for _ in range(num_drops):
        costs = {
            layer: _cost(model, [other for other in layers if other != layer], whole, replies)
            for layer in layers
        }
        best = min(costs, key=costs.__getitem__)
        layers.remove(best)
        drops.append(LayerDrop(layer=best, kl=costs[best]))
    return drops


def rank_blocks(model: Any, replies: Sequence[Reply], *, num_layers: int) -> list[LayerDrop]:
    """Order blocks of consecutive layers, named by their first, by how little they are missed."""
    layers = range(len(model.model.layers))
    whole = logprob_chunks(model, replies)
    drops = []
    for first in range(len(layers) - num_layers + 1):
        kept = [*layers[:first], *layers[first + num_layers :]]
        drops.append(LayerDrop(layer=first, kl=_cost(model, kept, whole, replies)))
    return sorted(drops, key=lambda drop: drop.kl)


def _cost(
    model: Any, kept: Sequence[int], whole: Sequence[torch.Tensor], replies: Sequence[Reply]
) -> float:
    with only_layers(model, kept):
        return mean_kl(whole, logprob_chunks(model, replies))


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """Run the model with some of its layers for a while."""
    whole = model.model.layers
    model.model.layers = torch.nn.ModuleList(whole[layer] for layer in kept)
    model.config.num_hidden_layers = len(kept)
    try:
        yield
    finally:
        model.model.layers = whole
        model.config.num_hidden_layers = len(whole)


@torch.inference_mode()
def logprob_chunks(model: Any, replies: Sequence[Reply]) -> list[torch.Tensor]:
    """Return the log-probabilities that predict the replies' tokens, each [tokens, vocabulary]."""
    longest = max(len(reply.token_ids) for reply in replies)
    ids = torch.zeros(len(replies), longest, dtype=torch.long)
    predicts = torch.zeros(len(replies), longest, dtype=torch.bool)
    for row, reply in enumerate(replies):
        # Padding stands right of the tokens: causal attention never sees it.
        ids[row, : len(reply.token_ids)] = torch.tensor(reply.token_ids)
        predicts[row, reply.num_prompt_tokens - 1 : len(reply.token_ids) - 1] = True
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[predicts]
    return [
        model.lm_head(chunk).float().log_softmax(-1) for chunk in states.split(TOKENS_PER_CHUNK)
    ]


@torch.inference_mode()
def mean_kl(log_p: Sequence[torch.Tensor], log_q: Sequence[torch.Tensor]) -> float:
    """Return KL(p || q) in nats per token, over the full vocabulary."""
    total = sum(
        torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
        for p, q in zip(log_p, log_q, strict=True)
    )
    return total / sum(map(len, log_p))
