# pyright: basic
# The gguf package ships partial types.
"""GGUF to a Hugging Face folder, for the Llama family: exact, without the transformers reader.

Quantised tensors are expanded to float32 and rounded to bfloat16. llama.cpp stores the rows of
the query and key projections interleaved for its rotary embedding; here they go back to the two
halves that Hugging Face expects.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from opdkit.actors.models.gguf_tokenizer import write_tokenizer
from opdkit.protocols.errors import ConfigError

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(source: Path, directory: Path) -> None:
    """Write config, generation config, bfloat16 weights and tokenizer into an empty folder.

    Raises:
        ConfigError: the file holds another architecture, or a tensor, rope scaling or
            pre-tokenizer that this conversion does not know.
    """
    reader = GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _llama_config(metadata, source)
    tensors = _llama_tensors(reader, config, source)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(metadata, directory)


def _llama_config(metadata: Mapping[str, Any], source: Path) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{source}: architecture is {architecture!r}, but only 'llama' is known")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"{source}: rope scaling is {scaling!r}, but only 'none' is known")
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    eos_token_id = metadata["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": metadata.get("llama.rope.dimension_count", hidden_size // num_heads),
        "max_position_embeddings": metadata["llama.context_length"],
        # Stored as float32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(
            np.format_float_positional(
                np.float32(metadata["llama.attention.layer_norm_rms_epsilon"])
            )
        ),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos_token_id,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", eos_token_id),
        "dtype": "bfloat16",
    }


def _llama_tensors(
    reader: GGUFReader, config: Mapping[str, Any], source: Path
) -> dict[str, torch.Tensor]:
    num_heads_of = {
        "self_attn.q_proj.weight": config["num_attention_heads"],
        "self_attn.k_proj.weight": config["num_key_value_heads"],
    }
    tensors = {}
    for stored in reader.tensors:
        name = _hugging_face_name(stored.name)
        if name is None:
            raise ConfigError(f"{source}: tensor {stored.name!r} is not known in a Llama model")
        weight = dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
        # GGUF lists dimensions with the contiguous one first.
        weight = weight.reshape(tuple(int(size) for size in reversed(stored.shape)))
        num_heads = num_heads_of.get(name.split(".", 3)[-1])
        if num_heads is not None:
            weight = deinterleave_rope(weight, num_heads=num_heads)
        tensors[name] = torch.tensor(weight).to(torch.bfloat16)
    return tensors


def _hugging_face_name(name: str) -> str | None:
    if not name.startswith("blk."):
        return OUTER_NAMES.get(name)
    _, layer, rest = name.split(".", 2)
    known = LAYER_NAMES.get(rest)
    return known and f"model.layers.{layer}.{known}"


def deinterleave_rope(weight: np.ndarray[Any, Any], *, num_heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's order of rows: per head (0, D/2, 1, D/2 + 1, …) back to 0 … D - 1.

    Args:
        weight: [num_heads * D, hidden].
        num_heads: Query heads, or key heads.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
