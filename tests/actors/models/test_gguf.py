# pyright: basic
# The gguf package ships partial types.
"""A small hand-made GGUF file comes back as the model that it was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from opdkit.actors.models.gguf import convert_gguf, deinterleave_rope
from opdkit.actors.models.micro import CHAT_TEMPLATE, SPECIAL_TOKENS, make_micro_model
from opdkit.protocols.errors import ConfigError
from tests.actors.models.loading import load_model, load_tokenizer

NUM_HEADS, NUM_KV_HEADS = 4, 2
NO_CHANGES: Mapping[str, str] = {}
SHORT_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave_rope(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows as llama.cpp's converter does."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{SHORT_NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(
    source: Path, path: Path, *, quantized: bool = False, changes: Mapping[str, str] = NO_CHANGES
) -> dict[str, torch.Tensor]:
    """Write a micro Llama folder as GGUF; return the tensors that a conversion must give."""
    config = json.loads((source / "config.json").read_text())
    bpe = json.loads((source / "tokenizer.json").read_text())["model"]
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(12345.0)
    writer.add_rope_dimension_count(config["hidden_size"] // NUM_HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("splitter", "smollm"))
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_chat_template(CHAT_TEMPLATE)
    expected = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        # Of bfloat16 precision, so that storing as float32 loses nothing.
        weight = tensor.to(torch.bfloat16).float().numpy()
        stored = weight
        if "q_proj" in name:
            stored = interleave_rope(weight, NUM_HEADS)
        if "k_proj" in name:
            stored = interleave_rope(weight, NUM_KV_HEADS)
        if quantized and weight.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), quantize(stored, kind), raw_dtype=kind)
            # Blocks lie within rows, so that their order does not matter.
            weight = dequantize(quantize(weight, kind), kind)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
        expected[name] = torch.tensor(weight).to(torch.bfloat16)
    if "extra_tensor" in changes:
        writer.add_tensor(changes["extra_tensor"], np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, tied: bool, quantized: bool) -> None:
    make_micro_model(tmp_path / "source", tied=tied)
    expected = write_gguf(tmp_path / "source", tmp_path / "model.gguf", quantized=quantized)
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    assert config["rms_norm_eps"] == 1e-5


def test_the_folder_loads_in_transformers(tmp_path: Path) -> None:
    make_micro_model(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    model = load_model(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 12345.0
    assert model.generation_config.eos_token_id == 2
    conversation = [{"role": "user", "content": "What is the sun?"}]
    ours, source = (
        load_tokenizer(folder).apply_chat_template(conversation, add_generation_prompt=True)[
            "input_ids"
        ]
        for folder in (tmp_path, tmp_path / "source")
    )
    assert ours == source


def test_the_tokenizer_keeps_unicode_and_splits_digits(tmp_path: Path) -> None:
    make_micro_model(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "naïve café, 你好 \U0001f642\n\tx = 12 + 100 <tag>  end "
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(tokenizer("2024")["input_ids"]) == 4
    assert tokenizer("<|im_end|>")["input_ids"] == [tokenizer.eos_token_id]


def test_rows_of_heads_go_back_to_halves() -> None:
    weight = np.arange(16, dtype=np.float32).reshape(8, 2)
    interleaved = interleave_rope(weight, 2)
    assert interleaved[:4, 0].tolist() == [0.0, 4.0, 2.0, 6.0]
    assert np.array_equal(deinterleave_rope(interleaved, num_heads=2), weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "architecture is 'gemma', but only 'llama' is known"),
        ({"splitter": "tekken"}, "tokenizer.ggml.pre is 'tekken', but only 'smollm' is known"),
        ({"extra_tensor": "rope_freqs.weight"}, "tensor 'rope_freqs.weight' is not known"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "tensor 'blk.0.attn_q.bias' is not known"),
    ],
)
def test_what_is_not_known_is_refused(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    make_micro_model(tmp_path / "source")
    write_gguf(tmp_path / "source", tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ConfigError, match=message):
        convert_gguf(tmp_path / "model.gguf", tmp_path)
