# pyright: basic
# transformers and tokenizers type their arguments loosely.
"""The byte-level BPE tokenizer and chat template that a GGUF file carries."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opdkit.protocols.errors import ConfigError

CONTROL_TOKEN = 3
"""``LLAMA_TOKEN_TYPE_CONTROL`` of llama.cpp."""


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer of a GGUF file's metadata in Hugging Face format.

    Raises:
        ConfigError: the vocabulary is no byte-level BPE, or is split in an unknown way.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = _byte_level_bpe(metadata)
    roles = {
        "bos_token": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{role: tokens[token_id] for role, token_id in roles.items() if token_id is not None},
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    fast.save_pretrained(directory)


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"tokenizer.ggml.model is {kind!r}, but only 'gpt2' is known")
    splitter = metadata.get("tokenizer.ggml.pre")
    if splitter != "smollm":
        raise ConfigError(f"tokenizer.ggml.pre is {splitter!r}, but only 'smollm' is known")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in map(str.split, metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer
