"""model/, parallel/, planning/ and timing/ can each be read alone; the model knows of no ranks."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vigpipe"
LAYERS = ("model", "parallel", "planning", "timing")


def is_for_type_checkers(node):
    names = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    return isinstance(node, ast.If) and ast.unparse(node.test) in names


def imports_of(source, package):
    """Every name a module of `package` imports when it runs, at any depth: full dotted names."""
    names = []
    pending = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if is_for_type_checkers(node):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package.rsplit(".", node.level - 1)[0] if node.level else ""
            names += [
                ".".join(filter(None, (start, node.module, alias.name))) for alias in node.names
            ]
        else:
            # torch.distributed is reached as an attribute too, once torch is imported.
            names += [ast.unparse(node)] * isinstance(node, ast.Attribute)
            pending += ast.iter_child_nodes(node)
    return names


def imports_of_layer(layer):
    """(file, name) pairs."""
    paths = sorted((PACKAGE / layer).rglob("*.py"))
    assert paths
    for path in paths:
        package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
        for name in imports_of(path.read_text(encoding="utf-8"), package):
            yield path.name, name


def is_within(name, module):
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_do_not_import_one_another(layer):
    others = [f"vigpipe.{other}" for other in LAYERS if other != layer]
    found = [
        (file, name)
        for file, name in imports_of_layer(layer)
        if any(is_within(name, other) for other in others)
    ]
    assert found == []


def test_the_operators_know_of_nothing_else():
    found = [(f, n) for f, n in imports_of_layer("ops") if is_within(n, "vigpipe")]
    assert [(f, n) for f, n in found if not is_within(n, "vigpipe.ops")] == []


def test_the_model_does_not_know_of_ranks():
    found = [(f, n) for f, n in imports_of_layer("model") if is_within(n, "torch.distributed")]
    assert found == []


def test_planning_is_plain_python():
    assert [(f, n) for f, n in imports_of_layer("planning") if is_within(n, "torch")] == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("from torch.distributed import all_reduce", "torch.distributed.all_reduce"),
        ("def f():\n    import torch.distributed.tensor", "torch.distributed.tensor"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("from ..parallel import mesh", "vigpipe.parallel.mesh"),
        ("from ..parallel.mesh import Layout", "vigpipe.parallel.mesh.Layout"),
        ("from .. import parallel", "vigpipe.parallel"),
        ("from .norm import merged", "vigpipe.model.norm.merged"),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch.distributed", "torch.distributed"),
    ],
)
def test_every_way_to_import_is_seen(source, name):
    assert name in imports_of(source, "vigpipe.model")


def test_what_only_type_checkers_import_is_not_counted():
    source = "if TYPE_CHECKING:\n    import torch.distributed"
    assert imports_of(source, "vigpipe.model") == []
