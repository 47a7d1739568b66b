"""What a folder in Hugging Face format says about its model, read without torch.

Only headers and JSON are read: a model of any size takes milliseconds.
"""

import pathlib
from typing import Any

import msgspec

from opdkit.actors.files.json_files import read_object
from opdkit.actors.files.tokenizer_files import TokenizerFiles, read_tokenizer
from opdkit.protocols.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}
_MAX_HEADER_BYTES = 100_000_000


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    logit_width: int
    """Rows of the output embedding, padding included: ``vocab_size`` of config.json."""
    max_positions: int
    is_tied: bool
    """The output embedding is the input embedding."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder that looks complete."""

    path: pathlib.Path
    shape: ModelShape
    tokenizer: TokenizerFiles
    eos_token_ids: tuple[int, ...]
    """Where generation ends: generation_config.json's, else config.json's; sorted."""
    pad_token_id: int | None
    bos_token_id: int | None
    num_parameters: int
    weight_bytes: int


def read_model(path: str | pathlib.Path, *, field: str) -> ModelFiles:
    """Read a model folder.

    Args:
        path: The folder.
        field: Name of the configuration field that gave it, for the messages.

    Raises:
        ConfigError: it is no complete folder of a supported model in safetensors format.
    """
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise ConfigError(f"{field} is {str(path)!r}, but there is no such folder")
    config = read_object(folder / "config.json", field=field)
    generation_path = folder / "generation_config.json"
    generation = read_object(generation_path, field=field) if generation_path.exists() else {}
    num_parameters, weight_bytes = _measure_weights(folder, field)
    return ModelFiles(
        path=folder,
        shape=_shape_of(config, f"{field} {str(folder)!r}"),
        tokenizer=read_tokenizer(folder, field=field),
        eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        pad_token_id=generation.get("pad_token_id", config.get("pad_token_id")),
        bos_token_id=generation.get("bos_token_id", config.get("bos_token_id")),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
    )


def _shape_of(config: dict[str, Any], where: str) -> ModelShape:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{where} is of model_type {model_type!r}, but must be one of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if "quantization_config" in config:
        raise ConfigError(f"{where} is quantized, but must hold plain weights")

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{where}: config.json has {key} {value!r}, but needs a positive number"
            )
        return value

    num_heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    return ModelShape(
        model_type=model_type,
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", num_heads),
        head_size=number("head_dim", hidden_size // num_heads),
        logit_width=number("vocab_size"),
        max_positions=number("max_position_embeddings"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def _measure_weights(folder: pathlib.Path, field: str) -> tuple[int, int]:
    """Return the number of parameters and their bytes, from the headers of all shards."""
    shards = _shards(folder, field)
    headers = [read_safetensors_header(shard, field=field) for shard in shards]
    num_parameters = num_bytes = 0
    for header in headers:
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            num_bytes += end - begin
            num_parameters += (end - begin) // _DTYPE_BYTES.get(tensor["dtype"], 1)
    return num_parameters, num_bytes


def _shards(folder: pathlib.Path, field: str) -> list[pathlib.Path]:
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        names = sorted(set(read_object(index_path, field=field)["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{field}: {index_path} names {missing[0]}, but it is not there")
        return [folder / name for name in names]
    if shards := sorted(folder.glob("*.safetensors")):
        return shards
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth"}
    )
    if others:
        raise ConfigError(
            f"{field} is {str(folder)!r}, whose weights are {others[0]}: loading that format can "
            "run code, so only safetensors is read; convert the model first"
        )
    raise ConfigError(f"{field} is {str(folder)!r}, but holds no weights (*.safetensors)")


def read_safetensors_header(path: pathlib.Path, *, field: str) -> dict[str, Any]:
    """Return name to ``dtype``, ``shape`` and ``data_offsets``, after checking the file's size.

    Raises:
        ConfigError: the file is cut, or is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"{field}: {path} is no safetensors file, or was cut")
        try:
            header: dict[str, Any] = msgspec.json.decode(file.read(header_bytes))
        except msgspec.DecodeError:
            raise ConfigError(f"{field}: {path} is no safetensors file") from None
    ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ConfigError(f"{field}: {path} has {size} bytes, but its header tells of {expected}")
    return header


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(sorted(value)) if isinstance(value, list) else (value,)
