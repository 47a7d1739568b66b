# pyright: basic
"""Names and layouts of weights: Hugging Face's, Megatron's, and a tensor-parallel rank's share.

Megatron keeps query, key and value in one matrix, ordered by key-value group (the group's
queries, its key, its value), and gate and up projection in another. A rank holds an equal part of
either side of the latter. With Transformer Engine two norms have other names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from opdkit.actors.megatron.architecture import Architecture

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYERS = "decoder.layers."

HF_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}

HF_LAYER_NAMES = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.linear_qkv.bias": (
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}

SHARDED_DIM = {
    EMBEDDING: 0,
    OUTPUT: 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
}
"""Dimension that tensor parallelism splits; the other weights are whole on every rank."""

GATED = "mlp.linear_fc1.weight"


def hf_names(name: str) -> tuple[str, ...]:
    """Return the Hugging Face names of what Megatron keeps under one name."""
    if name in HF_NAMES:
        return (HF_NAMES[name],)
    number, part = _layer_and_part(name)
    return tuple(f"model.layers.{number}.{hf_part}" for hf_part in HF_LAYER_NAMES[part])


def merge(parts: Sequence[Tensor], architecture: Architecture) -> Tensor:
    """Join Hugging Face's tensors to Megatron's: one as it is, gate and up, or q, k and v."""
    if len(parts) != 3:
        return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
    groups = architecture.num_kv_groups
    by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def split(name: str, whole: Tensor, architecture: Architecture) -> list[tuple[str, Tensor]]:
    """Undo ``merge``, and cut the padding off a vocabulary."""
    names = hf_names(name)
    if name in (EMBEDDING, OUTPUT):
        parts: Sequence[Tensor] = (whole[: architecture.vocab_size],)
    elif len(names) == 3:
        groups, size = architecture.num_kv_groups, architecture.head_size
        query_rows = architecture.num_heads // groups * size
        by_group = whole.reshape(groups, query_rows + 2 * size, *whole.shape[1:])
        by_kind = torch.split(by_group, [query_rows, size, size], dim=1)
        parts = [part.flatten(0, 1) for part in by_kind]
    else:
        parts = whole.chunk(len(names))
    return list(zip(names, parts, strict=True))


def shard(name: str, whole: Tensor, *, rank: int, size: int) -> Tensor:
    """Return a tensor-parallel rank's part of one of Megatron's tensors."""
    part = _part(name)
    if part not in SHARDED_DIM:
        return whole
    if part == GATED:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=SHARDED_DIM[part])[rank]


def unshard(name: str, shards: Sequence[Tensor]) -> Tensor:
    """Undo ``shard``, given the parts of all ranks in order."""
    part = _part(name)
    if part not in SHARDED_DIM or len(shards) == 1:
        return shards[0]
    if part == GATED:
        gates, ups = zip(*(piece.chunk(2) for piece in shards), strict=True)
        return torch.cat(gates + ups)
    return torch.cat(tuple(shards), dim=SHARDED_DIM[part])


@torch.no_grad()
def load_weights(model: Any, tensors: Mapping[str, Tensor], architecture: Architecture) -> None:
    """Fill this rank's model from Hugging Face's tensors, in whatever dtype those are.

    Raises:
        KeyError: ``tensors`` lacks a name that the model needs.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        whole = merge([tensors[hf_name] for hf_name in hf_names(name)], architecture)
        if name in (EMBEDDING, OUTPUT):
            padded = architecture.padded_vocab_size(size)
            whole = torch.nn.functional.pad(whole, (0, 0, 0, padded - whole.shape[0]))
        parameter.copy_(shard(name, whole, rank=rank, size=size))


def _part(name: str) -> str:
    return _layer_and_part(name)[1] if name.startswith(LAYERS) else name


def _layer_and_part(name: str) -> tuple[str, str]:
    number, _, part = name.removeprefix(LAYERS).partition(".")
    return number, part
