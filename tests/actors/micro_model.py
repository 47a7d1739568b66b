# pyright: basic
"""A two-layer Llama with random weights and a trained byte-level tokenizer, in a second."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from opdkit.actors.weight_checksum import checksum_of
from opdkit.protocols.ids import PolicyVersion
from opdkit.protocols.messages import WeightManifest

VOCAB_SIZE = 320
MAX_POSITIONS = 1024
SHARPNESS = 8.0
"""Random weights of the usual size give nearly uniform logits, at which errors hide."""


def make_micro_model(folder: Path, *, seed: int, tied: bool) -> Any:
    """Save a model and its tokenizer in Hugging Face format; return the model."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = random_model(config, seed=seed)
    model.save_pretrained(folder)
    return model


def random_model(config: Any, *, seed: int) -> Any:
    """Return a model of this shape with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    cls: Any = AutoModelForCausalLM  # has no types
    model = cls.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPNESS)
    return model


def publishable(model: Any, path: Path, *, version: int) -> WeightManifest:
    """Write a model's weights as a trainer would, and say what they are."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, path)
    return WeightManifest(
        policy_version=PolicyVersion(version),
        location=str(path),
        num_bytes=path.stat().st_size,
        checksum=checksum_of(tensors.items()),
    )


@torch.no_grad()
def logprobs_of(model: Any, token_ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Return [T, V] float32: row j is the distribution of token j + 1."""
    logits = model(torch.tensor([token_ids])).logits[0].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = json.dumps({f"key {n}": f"the value of {n} is {n * n}" for n in range(200)})
    tokenizer.train_from_iterator([text], trainer)
    cls: Any = PreTrainedTokenizerFast  # has no types
    wrapped = cls(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return wrapped
