"""Canaries: copies of tests whose expected values nothing honest can equal. Standard library only.

In a canary the expected side of an equality (the one without a call) is a fresh object, and an expected exception is a
fresh class. A right implementation fails it; whatever passes it is forged.
"""

import ast
from collections.abc import Iterator

EXPECTED = "__expected__"
"""Name that is bound to a fresh object."""
ERROR = "__unexpected_error__"
"""Name that is bound to a fresh exception class."""
HEAD = f"{EXPECTED} = object()\nclass {ERROR}(Exception): pass\n"
_EQUALITIES = {
    "assertEqual",
    "assertEquals",
    "assertListEqual",
    "assertDictEqual",
    "assertTupleEqual",
    "assertSetEqual",
}
_RAISES = {"raises", "assertRaises"}


def make_canary(source: str) -> tuple[str, set[str]]:
    """Return the canary copy of a test file, and the tests in it that must fail.

    Tests are named as pytest does inside a file: ``test_f`` or ``TestClass::test_f``.

    >>> text, tests = make_canary("def test_f(): assert f(1) == 2")
    >>> sorted(tests), "f(1) == __expected__" in text
    (['test_f'], True)
    >>> make_canary("def test_g(): assert g()")[1]
    set()
    """
    tree = ast.parse(source)
    canaried: set[str] = set()
    for name, node in tests_of(tree):
        if expect_fresh(node):
            canaried.add(name)
    return _with_head(tree), canaried


def tests_of(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Return the test functions and methods of a file with their names."""
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if is_test(node):
            found.append((node.name, node))  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef):
            found += [(f"{node.name}::{inner.name}", inner) for inner in node.body if is_test(inner)]  # type: ignore[attr-defined]
    return found


def is_test(node: ast.stmt) -> bool:
    """Whether a statement defines a test."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")


def expect_fresh(node: ast.AST) -> bool:
    """Replace expected values and exceptions in a test; returns whether there was any."""
    changed = False
    for inner in list(_walk(node)):
        if isinstance(inner, ast.Compare):
            changed |= _fresh_equality(inner)
        elif isinstance(inner, ast.Call):
            changed |= _fresh_call(inner)
    return changed


def _fresh_equality(node: ast.Compare) -> bool:
    if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
        return False
    side = _side(node.left, node.comparators[0])
    if side == "right":
        node.comparators = [_name(EXPECTED, node.comparators[0])]
    elif side == "left":
        node.left = _name(EXPECTED, node.left)
    return bool(side)


def _fresh_call(node: ast.Call) -> bool:
    """Replace the expected argument of an assertion method or the exception of a ``raises``."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _RAISES and node.args:
        node.args[0] = _name(ERROR, node.args[0])
        return True
    if name in _EQUALITIES and len(node.args) >= 2:
        side = _side(node.args[0], node.args[1])
        if side:
            place = 1 if side == "right" else 0
            node.args[place] = _name(EXPECTED, node.args[place])
        return bool(side)
    return False


def _side(left: ast.expr, right: ast.expr) -> str:
    """Return which side is the expected value: the one without a call, if the other has one."""
    left_calls, right_calls = _has_call(left), _has_call(right)
    if left_calls == right_calls:
        return ""
    return "right" if left_calls else "left"


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(inner, ast.Call) for inner in _walk(node))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, plain values left out: they are most of a test and hold neither call nor test."""
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        yield inner
        waiting += [child for child in ast.iter_child_nodes(inner) if not _is_value(child)]


_SEQUENCES = (ast.List, ast.Tuple)
_PLAIN = (ast.Constant, ast.expr_context)


def _is_value(node: ast.AST) -> bool:
    if isinstance(node, _PLAIN):
        return True
    if isinstance(node, _SEQUENCES):
        return all(map(_is_value, node.elts))
    return isinstance(node, ast.UnaryOp) and _is_value(node.operand)


def _name(name: str, like: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Name(name, ast.Load()), like)


def _with_head(tree: ast.Module) -> str:
    """Return the source with the fresh names defined behind its imports from the future."""
    place = 0
    for index, node in enumerate(tree.body):
        is_docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            place = index + 1
    tree.body[place:place] = ast.parse(HEAD).body
    return ast.unparse(ast.fix_missing_locations(tree))
