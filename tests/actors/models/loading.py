# pyright: basic
# transformers types its models loosely.
"""Open a model folder in transformers, as an untyped object."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def load_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
