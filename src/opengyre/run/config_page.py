"""Prints ``docs/config.md``: every key of the configuration with its type, default and meaning.

python -m opengyre.run.config_page > docs/config.md
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from opengyre.core import config as config_module
from opengyre.core.config import Config

_HEAD = """# Configuration

One TOML file describes a run; `opengyre train CONFIG.toml --set section.key=value` changes single keys. Unknown keys,
wrong types and values out of range are refused in one line (exit code 2). {count} keys; every one has a default.

This page is generated from `src/opengyre/core/config.py` by `make docs`.
"""


class Key(NamedTuple):
    """One key of the configuration.

    Example: ``Key("run", "steps", "integer, at least 1", "24", "Optimizer steps.")``.
    """

    section: str
    name: str
    kind: str
    default: str
    meaning: str


def field_documents() -> dict[str, dict[str, str]]:
    """Return class name to field name to the string that stands under the field.

    >>> field_documents()["RunSection"]["steps"]
    'Optimizer steps.'
    """
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = dict(_documents_of(node))
    return found


def _documents_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, under in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        text = ""
        if (
            isinstance(under, ast.Expr)
            and isinstance(under.value, ast.Constant)
            and isinstance(value := under.value.value, str)
        ):
            text = " ".join(value.split())
        yield field.target.id, text


def keys() -> list[Key]:
    """Return all keys in the order of the file.

    >>> keys()[0]
    Key(section='run', name='steps', kind='integer, at least 1', default='24', meaning='Optimizer steps.')
    """
    documents = field_documents()
    found = []
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type):
            found.append(
                Key(
                    section.name,
                    field.name,
                    kind_of(field.type),
                    _toml(_default(field)),
                    documents[section.type.__name__].get(field.name, ""),
                )
            )
    return found


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def kind_of(annotation: object) -> str:
    """Return a type and its range in words.

    >>> kind_of(config_module.Share), kind_of(bool)
    ('number, at least 0, at most 1', 'true or false')
    """
    return _kind_in_words(msgspec.inspect.type_info(annotation))


def _kind_in_words(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType(ge=least, le=most, gt=above):
            return "integer" + _range_in_words(least, most, above)
        case msgspec.inspect.FloatType(ge=least, le=most, gt=above):
            return "number" + _range_in_words(least, most, above)
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"list of {_kind_in_words(item)}"
        case msgspec.inspect.DictType(value_type=value):
            return "table" if isinstance(value, msgspec.inspect.AnyType) else f"table of {_kind_in_words(value)}"
        case _:
            return "text"


def _range_in_words(least: float | None, most: float | None, above: float | None) -> str:
    words = [
        f"{word} {bound:g}"
        for word, bound in (("at least", least), ("above", above), ("at most", most))
        if bound is not None
    ]
    return "".join(f", {word}" for word in words)


def page() -> str:
    """Return the whole page as Markdown."""
    found = keys()
    parts = [_HEAD.format(count=len(found))]
    for section in msgspec.structs.fields(Config):
        meaning = (inspect.getdoc(section.type) or "").splitlines()[0]
        parts.append(f"\n## [{section.name}]\n\n{meaning}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.extend(
            f"| `{key.name}` | {key.kind} | `{key.default}` | {key.meaning} |\n"
            for key in found
            if key.section == section.name
        )
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
