"""Draw mutants of the source, each with one changed node of its syntax tree."""

from __future__ import annotations

import ast
import copy
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tests

ROOT = Path(tests.__file__).parents[1]
PACKAGE = ROOT / "celery_sqs_backoff"

_SWAPPED: Mapping[type[ast.AST], type[ast.AST]] = {
    kind: other
    for a, b in (
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
        (ast.And, ast.Or),
    )
    for kind, other in ((a, b), (b, a))
}


@dataclass(frozen=True)
class Mutant:
    """A change to one node of a file's syntax tree, and the lines whose tests can notice it."""

    file: str  # its path in the package
    node: int  # its number in the walk over the tree
    line: int
    lines: tuple[int, ...]  # empty if the node runs at import, so that every test can notice it
    change: str


def draw(room: str, number: int, seed: int) -> list[Mutant]:
    """Return up to ``number`` mutants of a room. The same source and seed give the same ones."""
    found = [m for file in sorted((PACKAGE / room).rglob("*.py")) for m in mutants_of(file)]
    drawn = random.Random(f"{seed} {room}").sample(found, min(number, len(found)))
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.node))


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yield all possible mutants of a file."""
    name = file.relative_to(PACKAGE).as_posix()
    for index, (node, field, statement, is_late) in enumerate(_walk(ast.parse(file.read_text()))):
        if (changed := _changed(copy.copy(node), field)) is not None:
            change = f"{_short(node)} -> {_short(changed)}"
            whole = node if hasattr(statement, "body") else statement
            lines = {statement.lineno, *range(whole.lineno, whole.end_lineno + 1)}
            yield Mutant(name, index, node.lineno, tuple(sorted(lines if is_late else ())), change)


def planted(mutant: Mutant) -> ast.Module:
    """Return the syntax tree of a mutant's file with the change in it."""
    tree = ast.parse((PACKAGE / mutant.file).read_text())
    node, field, *_ = next(itertools.islice(_walk(tree), mutant.node, None))
    changed = ast.copy_location(_changed(copy.copy(node), field), node)

    class Replace(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return changed if visited is node else self.generic_visit(visited)

    return ast.fix_missing_locations(Replace().visit(tree))


def _walk(
    tree: ast.AST, statement: ast.stmt | None = None, is_late: bool = False
) -> Iterator[tuple[ast.stmt | ast.expr, str, ast.stmt, bool]]:
    """Yield each node that runs, its field in the parent, its statement, and whether it runs late.

    A node runs late if it runs when a function is called, and not at import.
    """
    for field, value in ast.iter_fields(tree):
        is_called = isinstance(tree, ast.FunctionDef | ast.Lambda) and field == "body"
        for node in value if isinstance(value, list) else [value]:
            if field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.AST):
                inside = node if isinstance(node, ast.stmt) else statement
                if isinstance(node, ast.stmt | ast.expr):
                    yield node, field, inside, is_late or is_called
                yield from _walk(node, inside, is_late or is_called)


def _changed(node: ast.AST, field: str) -> ast.AST | None:
    """Return the changed node, or None if there is no change for this kind of node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            node.ops = [_SWAPPED[type(op)]()]
        case ast.BoolOp(op=op):
            node.op = _SWAPPED[type(op)]()
        case ast.UnaryOp(op=ast.Not()):
            return node.operand
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int() | float()):
            node.value += 1
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            node.value = ast.Constant(None)
        case ast.Name() | ast.Attribute() | ast.Call() | ast.NamedExpr() if field == "test":
            return ast.UnaryOp(ast.Not(), node)
        case _:
            return None
    return node


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _short(node: ast.AST) -> str:
    line = " ".join(ast.unparse(node).split())
    return line if len(line) <= 60 else f"{line[:57]}..."
