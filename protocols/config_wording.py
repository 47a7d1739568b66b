"""What a configuration field allows, said in plain words."""

from typing import Any

from msgspec import inspect

SHOWN_CHARS = 80


def shown(value: object) -> str:
    """Return the value as it would be written in the configuration, cut if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def requirement(expected: inspect.Type, value: object = None) -> str:
    """Say what is allowed, to follow "must be": ``at least 1``, ``one of auto, float32``.

    The kind of value (``an integer``) is left out where ``value`` is of that kind already.
    """
    match expected:
        case inspect.IntType():
            is_kind = isinstance(value, int) and not isinstance(value, bool)
            return _number("an integer", is_kind, expected)
        case inspect.FloatType():
            is_kind = isinstance(value, int | float) and not isinstance(value, bool)
            return _number("a finite number", is_kind, expected)
        case inspect.LiteralType():
            return f"one of {', '.join(str(item) for item in expected.values)}"
        case inspect.UnionType():
            return ", or ".join(requirement(part, value) for part in expected.types)
        case inspect.VarTupleType():
            entries = f" of at least {expected.min_length}" if expected.min_length else ""
            return f"a list{entries}"
        case inspect.StrType():
            return _text(expected)
        case _:
            return _KINDS.get(type(expected), "a value")


_KINDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.DictType: "a mapping of keys to values",
    inspect.StructType: "a section: keys with values",
}


def _number(kind: str, is_kind: bool, expected: Any) -> str:
    bounds: list[str] = []
    if expected.ge is not None and expected.le is not None:
        bounds.append(f"between {expected.ge} and {expected.le}")
    elif expected.ge is not None:
        bounds.append(f"at least {expected.ge}")
    elif expected.le is not None:
        bounds.append(f"at most {expected.le}")
    if expected.gt is not None:
        bounds.insert(0, f"more than {expected.gt}")
    text = " and ".join(bounds)
    if is_kind and text:
        return text
    return f"{kind}, {text}" if text else kind


def _text(expected: inspect.StrType) -> str:
    if expected.pattern is not None:
        return (
            f"a name of at most {expected.max_length} letters, digits, '.', '_' and '-', "
            "with a letter or digit first"
        )
    return "text that is not empty" if expected.min_length else "text"
