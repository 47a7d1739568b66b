"""What is read from a model's folder, and folders that are refused."""

import json
import pathlib
from collections.abc import Callable

import pytest

from opdkit.actors.files.model_files import read_model
from opdkit.actors.files.tokenizer_files import read_tokenizer
from opdkit.protocols.errors import ConfigError
from tests.actors.model_folders import NUM_IDS, SPECIAL, TEMPLATE, write_model, write_tokenizer


def test_a_folder_tells_its_sizes(tmp_path: pathlib.Path) -> None:
    model = read_model(write_model(tmp_path / "m"), field="student.model")
    assert model.shape.num_heads == 4
    assert model.shape.head_size == 2
    assert model.shape.logit_width == model.tokenizer.num_ids == NUM_IDS
    assert model.num_parameters == NUM_IDS * 8
    assert model.weight_bytes == NUM_IDS * 32
    assert model.eos_token_ids == (258,)


def test_generation_config_decides_where_replies_end(tmp_path: pathlib.Path) -> None:
    folder = write_model(tmp_path / "m", generation={"eos_token_id": [258, 256]})
    assert read_model(folder, field="x").eos_token_ids == (256, 258)
    (folder / "generation_config.json").unlink()
    assert read_model(folder, field="x").eos_token_ids == (258,)


def _without_weights(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()


def _with_pickle(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut(folder: pathlib.Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _as_pointer(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _as_nothing(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _with_missing_shard(folder: pathlib.Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _change_config(**changes: object) -> Callable[[pathlib.Path], None]:
    def change(folder: pathlib.Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _remove(name: str) -> Callable[[pathlib.Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[pathlib.Path], None]:
    def write(folder: pathlib.Path) -> None:
        (folder / name).write_text(text)

    return write


BROKEN: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "no weights": (_without_weights, "holds no weights (*.safetensors)"),
    "only a pickle": (_with_pickle, "pytorch_model.bin: loading that format can run code"),
    "cut": (_cut, "bytes, but its header tells of"),
    "a pointer": (_as_pointer, "is no safetensors file, or was cut"),
    "empty weights": (_as_nothing, "is no safetensors file, or was cut"),
    "missing shard": (_with_missing_shard, "names model-00001-of-00002.safetensors"),
    "another family": (
        _change_config(model_type="mamba"),
        "model_type 'mamba', but must be one of llama, qwen2, qwen3",
    ),
    "quantized": (_change_config(quantization_config={}), "is quantized"),
    "no size": (_change_config(hidden_size=None), "config.json has hidden_size None"),
    "no config": (_remove("config.json"), "config.json: No such file"),
    "no tokenizer": (_remove("tokenizer.json"), "tokenizer.json: No such file"),
    "torn config": (_write("config.json", "{"), "config.json is not JSON"),
    "a list": (_write("config.json", "[]"), "config.json is a JSON list, not an object"),
    "no vocabulary": (_write("tokenizer.json", "{}"), "has no vocabulary"),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_folder_is_refused_naming_the_field(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None], message: str
) -> None:
    folder = write_model(tmp_path / "m")
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        read_model(folder, field="student.model")
    assert str(caught.value).startswith("student.model")
    assert message in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="but there is no such folder"):
        read_model(tmp_path / "none", field="student.model")


def test_equal_tokenizers_have_equal_digests(tmp_path: pathlib.Path) -> None:
    a = read_model(write_model(tmp_path / "a"), field="x").tokenizer
    b = read_model(write_model(tmp_path / "b"), field="x").tokenizer
    c = read_model(
        write_model(tmp_path / "c", special=("<|im_end|>", "<|im_start|>", "<|endoftext|>")),
        field="x",
    ).tokenizer
    assert a == b
    assert a.vocab_digest != c.vocab_digest
    assert a.added_digest != c.added_digest


@pytest.mark.parametrize("where", ["file", "list", "settings"])
def test_a_template_is_found_where_models_keep_it(tmp_path: pathlib.Path, where: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_tokenizer(folder, special=SPECIAL, template=TEMPLATE if where == "settings" else None)
    if where == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    if where == "list":
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_tokenizer(folder, field="x").chat_template == TEMPLATE
