# pyright: basic
# safetensors leaves parameters of its types open.
"""A pruned model is the chosen layers and nothing else."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opdkit.actors.models.micro import Architecture, make_micro_model
from opdkit.actors.models.pruning import prune_layers
from opdkit.protocols.errors import ConfigError
from tests.actors.models.loading import load_model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_chosen_layers_stay_bit_for_bit_and_are_renumbered(
    tmp_path: Path, architecture: Architecture
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_micro_model(source, architecture=architecture, num_layers=4)
    assert prune_layers(source, target, keep=(0, 2, 3))
    whole, pruned = (load_file(folder / "model.safetensors") for folder in (source, target))
    layer_of = {0: 0, 1: 2, 2: 3}
    for name, tensor in pruned.items():
        original = re.sub(r"layers\.(\d)", lambda m: f"layers.{layer_of[int(m[1])]}", name)
        assert torch.equal(tensor, whole[original]), name
    assert len(pruned) == len([name for name in whole if "layers.1." not in name])
    model = load_model(target)
    assert len(model.model.layers) == model.config.num_hidden_layers == 3


def test_everything_but_config_and_weights_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_micro_model(source)
    prune_layers(source, target, keep=(1,))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (source / name).read_bytes() == (target / name).read_bytes()


def test_layer_types_of_the_config_follow(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_micro_model(source, architecture="qwen2")
    path = source / "config.json"
    config = json.loads(path.read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"]
    path.write_text(json.dumps(config))
    prune_layers(source, target, keep=(1,))
    pruned = json.loads((target / "config.json").read_text())
    assert pruned["layer_types"] == ["sliding_attention"]


def test_the_same_pruning_again_changes_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_micro_model(source)
    prune_layers(source, target, keep=(0,))
    assert not prune_layers(source, target, keep=(0,))
    with pytest.raises(ConfigError, match=r"layers 1 of safetensors .* is wanted"):
        prune_layers(source, target, keep=(1,))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ((), "keep is empty"),
        ((1, 0), r"keep is \[1, 0\], but layers must be given once, in order"),
        ((0, 0), r"keep is \[0, 0\], but layers must be given once, in order"),
        ((0, 2), r"keep is \[0, 2\], but layers go from 0 to 1"),
        ((-1, 0), r"keep is \[-1, 0\], but layers go from 0 to 1"),
    ],
)
def test_layers_that_the_source_lacks_are_refused(
    tmp_path: Path, keep: tuple[int, ...], message: str
) -> None:
    make_micro_model(tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        prune_layers(tmp_path / "source", tmp_path / "target", keep=keep)
