# pyright: basic
"""The decoder layer: Megatron-Core's own parts, with two exchanged through its layer spec.

- ``RMSNorm``: Megatron's fallback for torch refuses sequence parallelism.
- ``PackedAttention``: Megatron's fallback refuses packed sequences and keeps all the scores.

Where Transformer Engine imports, its spec is used as it is; it has both.
"""

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

SHORT_TOKENS = 384
"""On a CPU, sequences below this attend in float32: torch's backward pass in bfloat16 takes four
times as long at 100 tokens, as long at 512."""


def layer_spec(config: TransformerConfig) -> Any:
    """Return what Megatron's ``GPTModel`` builds its decoder from."""
    if gpt_layer_specs.HAVE_TE and torch.cuda.is_available():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm
        )
    # A spec is a tree of whatever classes its modules want: Megatron types it as object.
    layer: Any = gpt_layer_specs.get_gpt_layer_local_spec(
        normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    attention = layer.submodules.self_attention
    norms = {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm} if config.qk_layernorm else {}
    attention.submodules = dataclasses.replace(
        attention.submodules, core_attention=PackedAttention, **norms
    )
    layer.submodules = dataclasses.replace(
        layer.submodules, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm
    )
    final_norm: Any = RMSNorm
    return TransformerBlockSubmodules([layer] * config.num_layers, final_norm)


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm, marked so that Megatron sums its gradient over the sequence's shards."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(
            hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no field of it


class PackedAttention(MegatronModule):  # type: ignore[misc]  # untyped base
    """Causal attention within each sequence of a pack, by ``scaled_dot_product_attention``."""

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__(config)
        assert config.kv_channels is not None
        self._scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query_TND: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> Tensor:
        """Return [T, N * D] of N heads of size D, of which N / G share one of G keys."""
        heads_per_group = query_TND.shape[1] // key_TGD.shape[1]
        key_TND, value_TND = (
            part.repeat_interleave(heads_per_group, dim=1) for part in (key_TGD, value_TGD)
        )
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        # Not by slices: the gradient of each would be a tensor of all tokens.
        parts = zip(*(part.split(lengths) for part in (query_TND, key_TND, value_TND)), strict=True)
        return torch.cat([self._one_sequence(*part) for part in parts]).flatten(1)

    def _one_sequence(self, query_SND: Tensor, key_SND: Tensor, value_SND: Tensor) -> Tensor:
        is_short_on_cpu = query_SND.device.type == "cpu" and len(query_SND) < SHORT_TOKENS
        dtype = torch.float32 if is_short_on_cpu else query_SND.dtype
        # A batch axis: without one torch falls back to the attention that keeps all scores.
        query, key, value = (
            part.transpose(0, 1).unsqueeze(0).to(dtype) for part in (query_SND, key_SND, value_SND)
        )
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self._scale
        )
        return output[0].transpose(0, 1).to(query_SND.dtype)
