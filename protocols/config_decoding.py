"""From plain values (a parsed YAML, ``key=value`` overrides) to a ``JobSpec``.

Unknown keys are refused with the nearest known one, before values are looked at.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from opdkit.protocols.config import JobSpec
from opdkit.protocols.errors import ConfigError


def decode_job(values: object) -> JobSpec:
    """Check and convert a tree of plain values.

    Raises:
        ConfigError: naming the key by its path, what is wrong and what is allowed.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"a job is a mapping of sections, got {type(values).__name__}")
    for problem in _unknown_keys(values, JobSpec, ""):
        raise ConfigError(problem)
    try:
        return msgspec.convert(values, JobSpec)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(_in_our_words(str(error))) from None


def apply_overrides(
    values: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Return a copy in which ``a.b.c`` has another value; missing sections are made."""
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
    child = node[_index(node, key, path)] if isinstance(node, list) else node.setdefault(key, {})
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


def _unknown_keys(values: object, expected: Any, path: str) -> Iterator[str]:
    section = _section_of(expected)
    if section is None:
        return
    if isinstance(values, Sequence) and not isinstance(values, str):
        for index, item in enumerate(values):
            yield from _unknown_keys(item, section, f"{path}[{index}]")
    if not isinstance(values, Mapping):
        return
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(section)}
    for key, item in values.items():
        here = f"{path}.{key}" if path else str(key)
        if key in fields:
            yield from _unknown_keys(item, fields[key], here)
        else:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            yield f"unknown key {here!r}; {hint}"


def _section_of(expected: Any) -> type[msgspec.Struct] | None:
    """Return the Struct in a type, also within Annotated, a union or a tuple."""
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        return expected
    for part in get_args(expected):
        if (section := _section_of(part)) is not None:
            return section
    return None


def _in_our_words(message: str) -> str:
    """Turn msgspec's ``<what> - at `$.a.b` `` into ``a.b: <what>``."""
    what, _, place = message.partition(" - at ")
    field = place.strip("`").removeprefix("$").removeprefix(".")
    return f"{field}: {what[:1].lower()}{what[1:]}" if field else what
