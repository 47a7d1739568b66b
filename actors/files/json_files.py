"""JSON objects on disk."""

import pathlib
from typing import Any

import msgspec

from opdkit.protocols.errors import ConfigError


def read_object(path: pathlib.Path, *, field: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.
        field: Name of the configuration field that led to it, for the messages.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{field}: {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{field}: {path} is a JSON {type(content).__name__}, not an object")
    return content
