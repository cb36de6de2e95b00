"""Which test runs which statement of the package, in whatever process.

A copy of the package notes each statement of its functions when it runs, in a file that all
processes of one pytest process have mapped. So nothing is lost with ranks, which leave by
`os._exit` or are killed: sys.settrace and coverage write what they know at a usual exit only.
"""

import ast
import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import blocks, files, statements

VARIABLE = "VIGPIPE_TEST_HITS"  # the file that is mapped, if lines are noted
_MODULE = f'''"""The statements that have run, a byte for each."""
import mmap, os
HITS = bytearray({{size}})
if path := os.environ.get("{VARIABLE}"):
    with open(path, "r+b") as file:
        HITS = mmap.mmap(file.fileno(), {{size}})
'''


def numbered(root: Path) -> dict[tuple[str, int], int]:
    """A number for each statement that faults can be planted in, by file and line."""
    places = {
        (file, statement.lineno): None
        for file in files(root)
        for statement in statements(ast.parse((root / file).read_bytes()))
    }
    return {place: number for number, place in enumerate(places)}


def note_lines(root: Path) -> None:
    """Let the package of a checkout note what runs; its files change."""
    numbers = numbered(root)
    (root / "vigpipe" / "_hits.py").write_text(_MODULE.format(size=len(numbers)))
    for file in files(root):
        path = root / file
        tree = ast.parse(path.read_bytes())
        noted = {id(statement) for statement in statements(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for block in list(blocks(node)):
                    block[:] = _with_notes(block, noted, file, numbers)
        first = 0
        while first < len(tree.body) and _comes_first(tree.body[first]):
            first += 1
        tree.body[first:first] = ast.parse("from vigpipe._hits import HITS as __hits__").body
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def _with_notes(
    block: list[ast.stmt], noted: set[int], file: str, numbers: dict[tuple[str, int], int]
) -> list[ast.stmt]:
    result = []
    for statement in block:
        if id(statement) in noted:
            result += ast.parse(f"__hits__[{numbers[file, statement.lineno]}] = 1").body
        result.append(statement)
    return result


def _comes_first(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


@dataclass(frozen=True)
class Ran:
    """What a test needed and ran.

    Attributes:
        test: its node id.
        seconds: of itself, with its own fixtures.
        shared: the fixtures that it shares with other tests, with their seconds.
        passed: whether it passed.
        hits: a byte for each statement, in the order of `numbered`.
    """

    test: str
    seconds: float
    shared: dict[str, float]
    passed: bool
    hits: bytes

    def line(self) -> str:
        packed = base64.b85encode(zlib.compress(self.hits)).decode()
        return json.dumps([self.test, self.seconds, self.shared, self.passed, packed])


def read(paths: Sequence[Path]) -> Iterator[Ran]:
    """What the workers of a run have written."""
    for path in paths:
        with path.open() as lines:
            for line in lines:
                test, seconds, shared, passed, packed = json.loads(line)
                hits = zlib.decompress(base64.b85decode(packed))
                yield Ran(test, seconds, shared, passed, hits)
