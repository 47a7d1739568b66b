"""From plain values (a parsed YAML, ``key=value`` overrides) to a ``JobSpec``.

The values are walked beside the types before anything is built, so that a message names the field
by its path, the value given and what is allowed, in the words of the configuration.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import inspect

from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_wording import requirement, shown
from opdkit.protocols.errors import ConfigError


def decode_job(values: object) -> JobSpec:
    """Check and convert a tree of plain values.

    Raises:
        ConfigError: naming the key by its path, what is wrong and what is allowed.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"a job is a mapping of sections, got {type(values).__name__}")
    for problem in _problems(values, JobSpec, ""):
        raise ConfigError(problem)
    try:
        return msgspec.convert(values, JobSpec)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(str(error)) from None


def apply_overrides(
    values: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Return a copy in which ``a.b.c`` has another value; missing sections are made.

    Raises:
        ConfigError: the path leads through a value that is no section, or past a list's end.
    """
    result: dict[str, Any] = _copy(values)
    for path, value in overrides:
        *parents, last = path.split(".")
        node: Any = result
        for index, key in enumerate(parents):
            node = _child(node, key, ".".join(parents[: index + 1]))
        if isinstance(node, list):
            node[_index(node, last, path)] = value
        else:
            node[last] = value
    return result


def _child(node: Any, key: str, path: str) -> Any:
    if isinstance(node, list):
        child = node[_index(node, key, path)]
    else:
        child = node.setdefault(key, {})
        if child is None:  # A section with all its lines commented out.
            child = node[key] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(f"{path} is {child!r}, not a section: it has no keys to override")
    return child


def _index(items: list[Any], key: str, path: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(f"{path}: {key!r} is no index of a list of {len(items)}")
    return int(key)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _problems(value: object, annotation: Any, path: str) -> Iterator[str]:
    """Yield what is wrong below ``path``: unknown keys of a section first, then its values."""
    expected = inspect.type_info(annotation)
    if isinstance(expected, inspect.StructType):
        yield from _section_problems(value, expected.cls, path)
    elif isinstance(expected, inspect.VarTupleType):
        yield from _list_problems(value, annotation, path)
    elif not _is_accepted(value, annotation):
        yield f"{path} is {shown(value)}, but must be {requirement(expected, value)}"


def _section_problems(value: object, section: type[msgspec.Struct], path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{path} is {shown(value)}, but must be a section: keys with values"
        return
    fields = {field.encode_name: field for field in msgspec.structs.fields(section)}
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            yield f"unknown key {_join(path, key)!r}; {hint}"
    for name, field in fields.items():
        here = _join(path, name)
        if name in value:
            yield from _problems(value[name], field.type, here)
        elif field.required and isinstance(inspect.type_info(field.type), inspect.StructType):
            yield from _problems({}, field.type, here)
        elif field.required:
            yield f"missing required {here}: {requirement(inspect.type_info(field.type), None)}"


def _list_problems(value: object, annotation: Any, path: str) -> Iterator[str]:
    expected = inspect.type_info(annotation)
    assert isinstance(expected, inspect.VarTupleType)
    if not isinstance(value, list | tuple) or len(value) < (expected.min_length or 0):
        yield f"{path} is {shown(value)}, but must be {requirement(expected, value)}"
        return
    sequence = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    for index, item in enumerate(value):
        yield from _problems(item, get_args(sequence)[0], f"{path}[{index}]")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_accepted(value: object, annotation: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return True
