"""What a Hugging Face ``config.json`` says of a decoder, and whether the trainer can build it.

Llama, Qwen2 and Qwen3, dense. Imports neither torch nor Megatron, so that a job can be checked
before anything is started.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opdkit.protocols.config import ParallelSection
from opdkit.protocols.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

VOCABULARY_MULTIPLE = 8
"""Each rank's share of the padded vocabulary is a multiple of this."""

# Megatron-Core knows Llama 3's scaling of rotary frequencies with these values only.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a decoder, as its ``config.json`` states it."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_groups: int
    head_size: int
    vocab_size: int
    norm_eps: float
    rope_base: float
    rope_factor: float | None
    """Llama 3's stretching of the rotary frequencies, if any."""
    tied: bool
    """The output layer is the transposed embedding."""

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Return the number of rows that the ranks' embedding shards have together."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


def read_architecture(model_dir: str | Path) -> Architecture:
    """Read ``config.json`` of a model folder.

    Raises:
        ConfigError: the file is missing, or describes a model that the trainer cannot build.
    """
    path = Path(model_dir) / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"student.model: cannot read {path}: {error}") from error
    return architecture_from(values)


def architecture_from(values: Mapping[str, Any]) -> Architecture:
    """Interpret the values of a ``config.json``.

    Raises:
        ConfigError: naming the key, its value and what is supported.
    """
    _refuse_unsupported(values)
    num_heads = values["num_attention_heads"]
    rope_base, rope_factor = _rope(values)
    return Architecture(
        model_type=values["model_type"],
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_hidden_size=values["intermediate_size"],
        num_heads=num_heads,
        num_kv_groups=values.get("num_key_value_heads") or num_heads,
        head_size=values.get("head_dim") or values["hidden_size"] // num_heads,
        vocab_size=values["vocab_size"],
        norm_eps=values["rms_norm_eps"],
        rope_base=rope_base,
        rope_factor=rope_factor,
        tied=values.get("tie_word_embeddings", False),
    )


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    model_type = values.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"student.model has model_type {model_type!r}, but the trainer builds "
            f"{', '.join(SUPPORTED_MODEL_TYPES)} only"
        )
    layer_types: set[str] = set(values.get("layer_types") or ())
    wanted: dict[str, tuple[object, object]] = {
        "hidden_act": ("silu", values.get("hidden_act", "silu")),
        "attention_bias": (False, values.get("attention_bias", False)),
        "mlp_bias": (False, values.get("mlp_bias", False)),
        "use_sliding_window": (False, values.get("use_sliding_window", False)),
        "layer_types": ([], sorted(layer_types - {"full_attention"})),
    }
    for key, (supported, value) in wanted.items():
        if value != supported:
            raise ConfigError(
                f"student.model has {key} {value!r} in its config.json, "
                f"but the trainer supports {supported!r} only"
            )


def _rope(values: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return base and stretching factor; older files keep the base outside the other values."""
    rope: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return base, None
    if kind == "llama3" and all(rope.get(key) == value for key, value in LLAMA3_ROPE.items()):
        return base, float(rope["factor"])
    raise ConfigError(
        f"student.model has rotary embeddings {dict(rope)!r}, but the trainer supports the "
        f"default ones and llama3 with {LLAMA3_ROPE} only"
    )


def check_parallel(architecture: Architecture, parallel: ParallelSection) -> None:
    """Refuse a tensor-parallel size that cuts an attention head or a key-value group.

    Raises:
        ConfigError: naming the size and the number that it must divide.
    """
    size = parallel.tensor
    parts = {
        "attention heads": architecture.num_heads,
        "key-value groups": architecture.num_kv_groups,
        "columns of the feed-forward layer": architecture.ffn_hidden_size,
    }
    for name, number in parts.items():
        if number % size:
            raise ConfigError(
                f"trainer.parallel.tensor is {size}, but must divide the model's {number} {name}"
            )
