# pyright: basic
"""Real model folders, as small as they can be."""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_IDS = 256 + len(SPECIAL)


def write_model(
    folder: pathlib.Path,
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    special: tuple[str, ...] = SPECIAL,
    template: str | None = TEMPLATE,
) -> pathlib.Path:
    """Write a Llama of some hundred parameters whose tokenizer knows every byte; return it."""
    folder.mkdir(parents=True)
    shape = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256 + len(special),
        "max_position_embeddings": 512,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "bos_token_id": 257,
    }
    _write_json(folder / "config.json", shape | (config or {}))
    _write_json(folder / "generation_config.json", {"eos_token_id": [258]} | (generation or {}))
    write_tokenizer(folder, special=special, template=template)
    weights = {"model.embed_tokens.weight": np.zeros((256 + len(special), 8), np.float32)}
    save_file(weights, folder / "model.safetensors")
    return folder


def write_tokenizer(
    folder: pathlib.Path, *, special: tuple[str, ...], template: str | None
) -> None:
    """Write a byte-level tokenizer: one id a byte, and the special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    if template is not None:
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value))
