"""What may not stand in the repository, and what must stand in a docstring."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "a marker of unfinished work": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a path of one machine": re.compile(
        r"/(wo" + r"rk/(main|shared)|ro" + r"ot/[\w.]|ho" + r"me/\w+/|tm" + r"p/parts)"
    ),
    "a registry host": re.compile(
        r"(py" + r"pi\.org|python" + r"hosted\.org|npm" + r"js\.(org|com)|proxy\.go" + r"lang|crates" + r"\.io)"
    ),
}
RECORDED = ("tests/data/",)
"""Recorded sessions of real harnesses say what they said."""


def tracked_files() -> list[Path]:
    answer = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if answer.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in answer.stdout.decode().split("\0") if name and not name.startswith(RECORDED)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data[:4096] else data.decode(errors="replace")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    pattern = FORBIDDEN[what]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()}"
        for path in tracked_files()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found)


def is_public(name: str) -> bool:
    return not name.startswith("_")


def documented_nodes(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Public classes, functions and methods outside functions."""
    found: list[tuple[str, ast.AST]] = [("module", tree)]
    waiting: list[ast.Module | ast.ClassDef] = [tree]
    while waiting:
        for node in waiting.pop().body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not is_public(node.name):
                continue
            if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            found.append((node.name, node))
            if isinstance(node, ast.ClassDef):
                waiting.append(node)
    return found


def docstring_fault(node: ast.AST) -> str:
    """What is wrong with the docstring of a node, empty if nothing is.

    One sentence comes first: its paragraph ends in a full stop, or in a colon before what it announces.
    """
    text = ast.get_docstring(node)
    if not text:
        return "has no docstring"
    first = text.split("\n\n", 1)[0].strip()
    return "" if first.endswith((".", ":", "?", "!", ")", "::")) else "does not begin with a whole sentence"


def test_the_docstring_gate_sees_what_is_missing():
    tree = ast.parse('"""A module."""\ndef f():\n    pass\nclass C:\n    """No sentence"""\n    def _m(self): pass\n')
    assert [(name, bool(docstring_fault(node))) for name, node in documented_nodes(tree)] == [
        ("module", False),
        ("f", True),
        ("C", True),
    ]


def test_everything_public_has_a_docstring_that_begins_with_one_sentence():
    found = [
        f"{path.relative_to(ROOT)}: {name} {fault}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name, node in documented_nodes(ast.parse(path.read_text()))
        if not (isinstance(node, ast.Module) and path.name == "__init__.py" and not node.body)
        and (fault := docstring_fault(node))
    ]
    assert not found, "\n".join(found)
