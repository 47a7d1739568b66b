# pyright: basic
# transformers types its configurations loosely.
"""Models of a hundred thousand parameters, the same on every machine, for tests and trials.

Weights are uniform draws of NumPy's frozen ``RandomState``, not of torch, whose normal draws
differ between processors in the last bit. The tokenizer is trained on text in this module.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from opdkit.actors.models.folders import make_folder
from opdkit.actors.models.micro_text import CORPUS
from opdkit.actors.models.pruning import prune_layers

Architecture = Literal["llama", "qwen2", "qwen3"]

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 512
MAX_POSITIONS = 1024
FIXED_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "dtype": "float32",
}
WEIGHT_BOUND = 0.35
"""Of the uniform draws: wide enough that greedy choices do not hang on rounding."""


def make_micro_model(
    directory: Path,
    *,
    architecture: Architecture = "llama",
    tied: bool = False,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 128,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> bool:
    """Write a random float32 model with tokenizer and chat template, in Hugging Face format.

    Heads and key-value groups of the defaults divide by 2, for tensor parallelism, and heads
    are 32 wide, the least that vLLM's attention takes on a CPU.

    Returns:
        Whether the folder was made now; False: it was there, undamaged.

    Raises:
        ConfigError: the folder is there, with another content.
    """
    shape = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "tie_word_embeddings": tied,
    }

    def write(draft: Path) -> None:
        tokenizer = _micro_tokenizer()
        tokenizer.save_pretrained(draft)
        roles = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {role: getattr(tokenizer, role) for role in roles}
        _write_model(draft, CONFIGS[architecture](**shape, **special, **FIXED_SHAPE), seed=seed)
        (draft / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")

    settings = " ".join(f"{key}={value}" for key, value in shape.items())
    return make_folder(directory, write, recipe=f"micro {architecture} seed={seed} {settings}")


def make_micro_pair(
    directory: Path, *, architecture: Architecture = "llama", tied: bool = False, seed: int = 0
) -> tuple[Path, Path]:
    """Write a teacher of four layers, and a student of its first and last, with one tokenizer.

    Returns:
        The folders ``teacher`` and ``student``.

    Raises:
        ConfigError: one of the folders is there, with another content.
    """
    teacher, student = directory / "teacher", directory / "student"
    make_micro_model(teacher, architecture=architecture, tied=tied, seed=seed, num_layers=4)
    prune_layers(teacher, student, keep=(0, 3))
    return teacher, student


def _write_model(draft: Path, config: Any, *, seed: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # Tied embeddings appear once among the parameters, and once in the file.
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    tensors = _random_tensors(shapes, seed=seed)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    config.save_pretrained(draft)


def _random_tensors(shapes: Mapping[str, tuple[int, ...]], *, seed: int) -> dict[str, torch.Tensor]:
    """Draw matrices around 0 and norms around 1."""
    random = np.random.RandomState(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        center = 1.0 if name.endswith("norm.weight") else 0.0
        draws = random.uniform(center - WEIGHT_BOUND, center + WEIGHT_BOUND, shape)
        tensors[name] = torch.tensor(draws, dtype=torch.float32)
    return tensors


def _micro_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
