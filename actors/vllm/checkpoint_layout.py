"""Names and shapes of the tensors in a Hugging Face model folder, read from the file headers."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

TIED_OUTPUT = "lm_head.weight"
"""Present or absent in files of models whose output layer is the embedding: never needed."""

Layout = Mapping[str, tuple[int, ...]]


def layout_of_folder(model: Path) -> Layout:
    """Return the shape of every tensor of a model, without reading weights.

    Raises:
        FileNotFoundError: the folder holds no safetensors file.
    """
    paths = sorted(model.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{model} holds no *.safetensors file")
    layout: dict[str, tuple[int, ...]] = {}
    for path in paths:
        layout |= layout_of_file(path)
    if _ties_output(model):
        layout.pop(TIED_OUTPUT, None)
    return layout


def layout_of_file(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in one safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def difference(expected: Layout, found: Layout) -> str | None:
    """Say what keeps ``found`` from replacing ``expected``; None: nothing does."""
    found = dict(found)
    if TIED_OUTPUT not in expected:
        found.pop(TIED_OUTPUT, None)
    if missing := sorted(expected.keys() - found.keys()):
        return f"{len(missing)} tensors are missing, the first is {missing[0]}"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"{len(unknown)} tensors are unknown, the first is {unknown[0]}"
    for name, shape in expected.items():
        if found[name] != shape:
            return f"{name} has shape {found[name]}, expected {shape}"
    return None


def _ties_output(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))
