"""What a ``config.json`` may and may not say."""

import json
from pathlib import Path
from typing import Any

import pytest

from opdkit.actors.megatron.architecture import (
    architecture_from,
    check_parallel,
    read_architecture,
)
from opdkit.protocols.config import ParallelSection
from opdkit.protocols.errors import ConfigError

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "hidden_act": "silu",
}


def test_values_are_read_from_older_and_newer_files(tmp_path: Path) -> None:
    newer: dict[str, Any] = dict(QWEN3)
    del newer["rope_theta"], newer["rope_scaling"]
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    (tmp_path / "config.json").write_text(json.dumps(newer))
    architecture = read_architecture(tmp_path)
    assert architecture == architecture_from(QWEN3)
    assert architecture.head_size == 128
    assert architecture.rope_base == 1000000.0
    assert architecture.tied


def test_scaling_of_llama_3_is_understood() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    values = {**QWEN3, "model_type": "llama", "rope_scaling": scaling}
    assert architecture_from(values).rope_factor == 32.0
    with pytest.raises(ConfigError, match="rotary embeddings"):
        architecture_from({**values, "rope_scaling": {**scaling, "high_freq_factor": 2.0}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^student\.model has "):
        architecture_from({**QWEN3, key: value})


def test_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        read_architecture(tmp_path)


def test_tensor_parallel_size_must_divide_heads_groups_and_columns() -> None:
    architecture = architecture_from(QWEN3)
    check_parallel(architecture, ParallelSection(tensor=8))
    with pytest.raises(ConfigError, match=r"tensor is 3, but must divide the model's 16 attention"):
        check_parallel(architecture, ParallelSection(tensor=3))
    with pytest.raises(ConfigError, match=r"tensor is 16, but .* 8 key-value groups"):
        check_parallel(architecture, ParallelSection(tensor=16))


def test_padded_vocabulary_splits_evenly() -> None:
    architecture = architecture_from({**QWEN3, "vocab_size": 93})
    assert architecture.padded_vocab_size(1) == 96
    assert architecture.padded_vocab_size(2) == 96
    assert architecture.padded_vocab_size(3) == 96
    assert architecture.padded_vocab_size(5) == 120
