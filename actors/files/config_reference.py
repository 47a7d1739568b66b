"""docs/configuration.md, from the configuration tree itself.

``python -m opdkit.actors.files.config_reference >docs/configuration.md`` brings it up to date.
Types and defaults come from the classes; what a field means, from the text below it in the source,
which does not exist at run time and is read with ``ast``.
"""

import ast
import inspect as source
import sys
from collections.abc import Iterator

import msgspec
from msgspec import inspect

from opdkit.protocols import config
from opdkit.protocols.config_fields import Section
from opdkit.protocols.config_wording import requirement, shown

_PREAMBLE = """\
# Configuration

A job is one YAML file. `opdkit run`, `opdkit check` and `opdkit.JobSpec` take the
same fields. This page is generated from the classes in `protocols/config*.py`.

The smallest job:

```yaml
job:
  name: first
student:
  model: models/student
  max_model_len: 512
teachers:
  - model: models/teacher
    max_model_len: 513
data:
  train: prompts.jsonl
pipeline:
  num_steps: 100
```

- On the command line any field has another value with `section.key=value`, and a teacher's with
  `teachers.0.key=value`. The value is read as YAML: `rollout.stop_token_ids=[2, 7]`.
- Unknown keys, and a key given twice, are errors. `1e-4` is a number.
- Relative paths are relative to the working directory.
- Rules across fields and what depends on the models, the data and the machine are checked by
  `opdkit check CONFIG`, which starts nothing.
"""


def render() -> str:
    """Return the whole page."""
    parts = [_PREAMBLE]
    for field in msgspec.structs.fields(config.JobSpec):
        expected = inspect.type_info(field.type)
        if isinstance(expected, inspect.VarTupleType):
            parts += _section(expected.item_type, f"{field.name}[i]")
        else:
            parts += _section(expected, field.name)
    return "\n".join(parts)


def _section(expected: inspect.Type, path: str) -> Iterator[str]:
    """Yield a section's heading, text and table, then the sections in it."""
    assert isinstance(expected, inspect.StructType)
    descriptions = _field_texts(expected.cls)
    rows: list[str] = []
    nested: list[tuple[inspect.Type, str]] = []
    for field in expected.fields:
        if isinstance(field.type, inspect.StructType):
            nested.append((field.type, f"{path}.{field.name}"))
        else:
            text = descriptions.get(field.name, "")
            rows.append(
                f"| `{field.name}` | {_default(field)} | {requirement(field.type)} | {text} |"
            )
    yield f"## `{path}`\n\n{_plain(expected.cls.__doc__ or '')}\n"
    yield "| field | default | allowed | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    for inner, inner_path in nested:
        yield from _section(inner, inner_path)


def _default(field: inspect.Field) -> str:
    if field.required:
        return "**required**"
    if field.default is msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(value, str):
        return f"`{value}`" if value else ""
    return f"`{shown(value)}`"


def _field_texts(cls: type) -> dict[str, str]:
    """Return the string literal below each field, of the class and its bases."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not issubclass(owner, Section):
            continue
        (definition,) = ast.parse(source.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = _plain(text)
                case _:
                    pass
    return texts


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
