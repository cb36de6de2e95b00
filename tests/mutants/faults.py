"""Which faults can be planted in the package's Python, and their planting."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("model", "graphs", "parallel", "replication", "run", "checkpoint", "data")
_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
_TURNED |= {after: before for before, after in _TURNED.items()}
_SWAPPED: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_LEFT_OUT = (ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Break, ast.Continue)


@dataclass(frozen=True)
class Fault:
    """A piece of one file's text, and what stands there instead.

    Attributes:
        file: relative to the checkout.
        statement: the line that its statement begins in; the map of lines knows this line.
        begin: offset of the piece in the file's bytes; end: that of the first byte behind it.
        kind: `comparison`, `constant`, `left out`, `sign` or `branch`.
        before: the piece, in one line.
        after: what is planted.
    """

    file: str
    statement: int
    begin: int
    end: int
    kind: str
    before: str
    after: str

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.statement}: {self.kind}: {self.before} → {self.after}"

    def plant(self, root: Path) -> None:
        """Write the file of a checkout with this fault."""
        path = root / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.begin] + self.after.encode() + text[self.end :])


def files(root: Path) -> list[str]:
    """The files that faults are planted in, relative to the checkout."""
    paths = (path for room in ROOMS for path in (root / "vigpipe" / room).rglob("*.py"))
    return sorted(str(path.relative_to(root)) for path in paths)


def draw(root: Path, number: int, seed: int) -> list[Fault]:
    """Draw faults by chance; all that can be planted are equally likely."""
    every = [fault for file in files(root) for fault in possible(file, (root / file).read_bytes())]
    return random.Random(seed).sample(every, min(number, len(every)))


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements in bodies of functions, docstrings and declarations left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in blocks(node):
                yield from (statement for statement in block if _does_something(statement))


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements under a function or statement, without those of nested functions."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
            for statement in block:
                if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from blocks(statement)
    for inner in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from blocks(inner)


def _does_something(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom)


def possible(file: str, text: bytes) -> Iterator[Fault]:
    """Every fault that can be planted in a file, in the order of its lines."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in statements(ast.parse(text)):
        for node, kind, after in _changes(statement):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = " ".join(text[begin:end].decode().split())
            yield Fault(file, statement.lineno, begin, end, kind, before, after)


def _changes(statement: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """What can be changed in a statement, apart from the blocks under it."""
    if _can_be_left_out(statement):
        yield statement, "left out", "pass"
    if isinstance(statement, ast.If | ast.While):
        yield statement.test, "branch", "False"
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _SWAPPED:
        other = ast.AugAssign(statement.target, _SWAPPED[type(statement.op)](), statement.value)
        yield statement, "sign", ast.unparse(other)
    if not isinstance(statement, ast.Raise | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for node in _expressions(statement):
            yield from _expression_changes(node)


def _can_be_left_out(statement: ast.stmt) -> bool:
    """Whether something else than an unknown name comes of leaving a statement out."""
    if isinstance(statement, ast.Assign):
        used = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
        names = [t.id for t in statement.targets if isinstance(t, ast.Name)]
        bound = [t for t in statement.targets if isinstance(t, ast.Tuple | ast.List)]
        return not bound and used.issuperset(names)
    if isinstance(statement, ast.Return):
        return statement.value is not None
    return isinstance(statement, _LEFT_OUT)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement; no text, no annotation, no statement under it."""
    others = ast.stmt | ast.JoinedStr | ast.ExceptHandler | ast.match_case
    for child in ast.iter_child_nodes(node):
        if isinstance(child, others) or child is getattr(node, "annotation", None):
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from _expressions(child)


def _expression_changes(node: ast.expr) -> Iterator[tuple[ast.expr, str, str]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _TURNED:
            other = ast.Compare(node.left, [_TURNED[type(op)]()], node.comparators)
            yield node, "comparison", f"({ast.unparse(other)})"
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text(node.left, node.right):
            swapped = ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right)
            yield node, "sign", f"({ast.unparse(swapped)})"
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield node, "constant", f"({value + 1})"
        case ast.IfExp():
            yield node.test, "branch", "False"
        case _:
            pass


def _is_text(*nodes: ast.expr) -> bool:
    """Whether text is joined, of which a difference would only be an error of types."""
    return any(
        isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )
