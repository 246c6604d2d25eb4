"""Functions under 60 lines, files under 500, one broad except in the product, file names unique among the tests."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES = 60
FILE_LINES = 500
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), str(path)))


def long_functions(source: str) -> list[tuple[str, int]]:
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Function)
    }
    return [(name, lines) for name, lines in lengths.items() if lines >= FUNCTION_LINES]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler swallows everything: one that ends by raising only cleans up or translates."""
    kind = handler.type
    names = [kind] if not isinstance(kind, ast.Tuple) else kind.elts
    catches_all = kind is None or any(isinstance(n, ast.Name) and n.id in {"Exception", "BaseException"} for n in names)
    last = handler.body[-1]
    return catches_all and not isinstance(last, ast.Raise)


def test_the_gate_sees_a_long_function():
    assert long_functions("def f():\n" + "    x = 1\n" * 58) == []
    assert long_functions("def f():\n" + "    x = 1\n" * 59) == [("f", 60)]


def test_functions_are_under_60_lines():
    found = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path in python_files("src", "tests", "scripts")
        for name, lines in long_functions(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_files_are_under_500_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in python_files("src", "tests", "scripts")}
    found = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines >= FILE_LINES]
    assert not found, "\n".join(found)


def test_the_gate_tells_a_broad_except_from_a_clean_up():
    handlers = [
        ast.parse(f"try:\n    f()\n{text}").body[0].handlers[0]
        for text in ("except Exception:\n    pass", "except:\n    pass", "except BaseException:\n    g()\n    raise")
    ]
    assert [is_broad(handler) for handler in handlers] == [True, True, False]


def test_at_most_one_broad_except_stands_in_the_product_and_it_is_at_the_execution():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files("src/opengyre")
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert len(found) <= 1, found
    assert all(place.startswith("src/opengyre/execute/") for place in found), found


def test_test_files_have_names_of_their_own():
    counts = Counter(path.name for path in python_files("tests") if path.name.startswith("test_"))
    assert not [name for name, count in counts.items() if count > 1]


def test_tests_assert_something():
    def checks(function: Function) -> bool:
        return any(
            isinstance(node, ast.Assert | ast.With | ast.AsyncWith)
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "assert" in node.func.id)
            or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.startswith("check"))
            for node in ast.walk(function)
        )

    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in python_files("tests")
        for node in nodes(path)
        if isinstance(node, Function) and node.name.startswith("test_") and not checks(node)
    ]
    assert not found, "\n".join(found)
