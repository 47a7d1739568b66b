# pyright: basic
# safetensors leaves parameters of its types open.
"""A student made of some of its teacher's layers, in the same format.

Which layers: see ``layer_ranking``.
"""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from opdkit.actors.models.folders import MANIFEST_NAME, make_folder, sha256_of
from opdkit.protocols.errors import ConfigError

LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+)")


def prune_layers(source: Path, target: Path, *, keep: Sequence[int]) -> bool:
    """Write a model that has only the layers ``keep`` of the source, numbered from 0.

    Everything else, embeddings, tokenizer and chat template, is the source's, bit for bit.

    Returns:
        Whether the folder was made now; False: it was there, made so, undamaged.

    Raises:
        ConfigError: ``keep`` is empty, not increasing or names a layer that the source lacks, or
            the target is there but damaged or of another origin.
    """
    config = json.loads((source / "config.json").read_text())
    _check_kept(keep, num_layers=config["num_hidden_layers"])

    def write(draft: Path) -> None:
        _copy_other_files(source, draft)
        pruned = json.dumps(_pruned_config(config, keep), indent=2)
        (draft / "config.json").write_text(pruned + "\n")
        tensors = _pruned_tensors(source, keep)
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})

    digests = " ".join(sha256_of(path) for path in sorted(source.glob("*.safetensors")))
    layers = ",".join(map(str, keep))
    return make_folder(target, write, recipe=f"layers {layers} of safetensors sha256:{digests}")


def _check_kept(keep: Sequence[int], *, num_layers: int) -> None:
    if not keep:
        raise ConfigError("keep is empty: a model needs at least one layer")
    if list(keep) != sorted(set(keep)):
        raise ConfigError(f"keep is {list(keep)}, but layers must be given once, in order")
    if keep[0] < 0 or keep[-1] >= num_layers:
        raise ConfigError(f"keep is {list(keep)}, but layers go from 0 to {num_layers - 1}")


def _pruned_config(config: dict[str, Any], keep: Sequence[int]) -> dict[str, Any]:
    pruned = {**config, "num_hidden_layers": len(keep)}
    if layer_types := config.get("layer_types"):
        pruned["layer_types"] = [layer_types[layer] for layer in keep]
    if "max_window_layers" in config:
        pruned["max_window_layers"] = min(config["max_window_layers"], len(keep))
    return pruned


def _copy_other_files(source: Path, draft: Path) -> None:
    replaced = {"config.json", MANIFEST_NAME, "model.safetensors.index.json"}
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in replaced:
            shutil.copyfile(path, draft / path.name)


def _pruned_tensors(source: Path, keep: Sequence[int]) -> dict[str, torch.Tensor]:
    new_index = {layer: index for index, layer in enumerate(keep)}
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            match = LAYER_PATTERN.fullmatch(name)
            if match is None:
                tensors[name] = tensor
            elif (layer := int(match[1])) in new_index:
                tensors[f"model.layers.{new_index[layer]}.{match[2]}"] = tensor
    return tensors
