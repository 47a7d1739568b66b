# pyright: basic
"""Megatron-Core's configuration of a decoder."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from opdkit.actors.megatron.architecture import Architecture
from opdkit.protocols.config import ParallelSection


def transformer_config(
    architecture: Architecture, parallel: ParallelSection, *, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    """Return Megatron-Core's configuration of this rank's model."""
    recomputation: dict[str, Any] = (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        if recompute
        else {}
    )
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_groups,
        kv_channels=architecture.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.model_type == "qwen3",
        add_qkv_bias=architecture.model_type == "qwen2",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,
        # Weights come from a file; drawing them first would only take time.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        embedding_init_method=_leave_as_is,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **recomputation,
    )


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight
