"""Write vigpipe/config/keywords.py from the options of a run: `python -m docs.keywords`."""

import ast
from pathlib import Path

from vigpipe.config import keywords, options

FILE = Path(keywords.__file__)
FIRST = "    model:"  # where the keywords begin


class _Keyword(ast.NodeTransformer):
    """Turns the type of an option into that of a keyword, which takes a path as text too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == "Path":
            return ast.BinOp(node, ast.BitOr(), ast.Name("str"))
        return node


def text() -> str:
    """The file: its head as it is, and a keyword for each option, in their order."""
    head, _, _ = FILE.read_text(encoding="utf-8").partition(FIRST)
    tree = ast.parse(Path(options.__file__).read_text(encoding="utf-8"))
    (of_training,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == options.TrainConfig.__name__
    )
    fields = [node for node in of_training.body if isinstance(node, ast.AnnAssign)]
    names = [ast.unparse(field.target) for field in fields]
    types = [ast.unparse(_Keyword().visit(field.annotation)) for field in fields]
    types = [f"Path | {t}" if n in options.PLACES else t for n, t in zip(names, types, strict=True)]
    types = ["Any" if n == "data" else t for n, t in zip(names, types, strict=True)]  # or a graph
    lines = (f"    {name}: {kind}\n" for name, kind in zip(names, types, strict=True))
    return head + "".join(lines).replace("'", '"')


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
