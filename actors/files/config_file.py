# pyright: basic
"""A job's YAML file and the ``key=value`` overrides of the command line.

Two corners of YAML 1.1 are squared off: a key given twice is refused, since the first would be
lost silently, and ``1e-4`` is a number, not text.
"""

import pathlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped]  # ships no type information

from opdkit.protocols.config import JobSpec
from opdkit.protocols.config_decoding import apply_overrides, decode_job
from opdkit.protocols.errors import ConfigError

_EXPONENT_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def read_job(path: str | pathlib.Path, *, overrides: Sequence[str] = ()) -> JobSpec:
    """Read, override and check the job that a YAML file describes.

    Args:
        path: The file. Relative paths in it are relative to the working directory.
        overrides: ``a.b.c=value`` each, with the value written as in YAML; later ones win.

    Raises:
        ConfigError: naming the file and the line, or the field, its value and what is allowed.
    """
    values = parse_yaml(_text_of(pathlib.Path(path)), name=str(path))
    if values is None:
        raise ConfigError(f"{path} is empty, but must describe a job")
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}, not a mapping of sections")
    return decode_job(apply_overrides(values, [parse_override(text) for text in overrides]))


def parse_override(text: str) -> tuple[str, Any]:
    """Split ``a.b.c=value`` and read the value as YAML: ``3`` is a number, ``[1, 2]`` a list.

    Raises:
        ConfigError: no ``=``, an empty part of the path, or a value that is no YAML.
    """
    path, equals, value = text.partition("=")
    if not equals or not all(part.strip() == part and part for part in path.split(".")):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    return path, parse_yaml(value, name=f"override {text!r}")


def parse_yaml(text: str, *, name: str) -> Any:
    """Read one YAML document of plain values.

    Raises:
        ConfigError: it is no YAML, gives a key twice, holds itself, or is nested too deeply; with
            ``name`` and, but for the last, the line.
    """
    try:
        # _JobLoader derives from SafeLoader: it constructs plain values only.
        return yaml.load(text, Loader=_JobLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None


def format_job(spec: JobSpec) -> str:
    """Write a job as YAML, every field with its value; ``parse_yaml`` reads it back the same."""
    text: str = yaml.safe_dump(msgspec.to_builtins(spec), sort_keys=False, allow_unicode=True)
    return text


def _text_of(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is invalid") from None


class _JobLoader(yaml.SafeLoader):  # type: ignore[misc]  # untyped base
    """Plain values only, every key once, exponents without a point are floats."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build a value whole, which refuses one that holds itself, or say where it is none."""
        try:
            return super().construct_object(node, deep=True)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            # PyYAML converts text without a look at it: whatever int() or a missed match raises.
            what = repr(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            raise yaml.constructor.ConstructorError(
                problem=f"{what} is no {node.tag.rpartition(':')[2]}",
                problem_mark=node.start_mark,
            ) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice in one mapping."""
        lines: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in lines and key_node.value != "<<":
                first = lines[key_node.value]
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key_node.value!r} stands here and in line {first}",
                    problem_mark=key_node.start_mark,
                )
            lines[key_node.value] = key_node.start_mark.line + 1
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


_JobLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+.0123456789"))
