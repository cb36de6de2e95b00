"""Make the arrays of a graph file of what people have in Python: Data, NetworkX, tables of arrays.

Neither torch-geometric nor NetworkX is imported; an object is known by what it has.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vigpipe.config.typed import shown
from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few
from vigpipe.graphs.choices import COLUMNS, Choices
from vigpipe.graphs.formats.graph_file import EDGES, KNOWN, graph_of, in_our_names
from vigpipe.graphs.imports.from_tables import Names, Nodes
from vigpipe.graphs.imports.tables import Rows
from vigpipe.graphs.imports.write import write_graph_file

_FACTS_OF_DATA = ("num_nodes", "batch", "ptr")  # of torch-geometric, which say nothing new


@contextmanager
def graph_file_of(
    found: Any, where: str, *, trains: bool, like: Choices | None = None
) -> Iterator[Path]:
    """Yield a graph file of an object, which goes afterwards; the errors begin with `where`.

    InputError if it is no graph, or none to train on if it is to be. `like` are the choices for the
    attributes of NetworkX's nodes, which by default are made for these.
    """
    if not is_graph(found):
        raise InputError(
            f"{where}={shown(found)}: must be text, a path, torch-geometric's Data, a NetworkX "
            "graph, or a table of arrays as in a graph file"
        )
    arrays = in_our_names(arrays_of(found, where, like), where)
    missing = [name for name in (*EDGES, *(("y", "split") if trains else ())) if name not in arrays]
    if missing:
        raise InputError(
            f"{where}: has {', '.join(arrays) or 'nothing'}, but lacks {', '.join(missing)}"
            f"{', or masks, as RandomNodeSplit makes them' * ('split' in missing)}; add what lacks"
        )
    graph_of(arrays, where, multi_label=has_several(arrays.get("y")), trains=trains)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        write_graph_file(path, arrays, lambda _: None)
        yield path


def has_several(labels: np.ndarray | None) -> bool:
    """Whether labels may say several classes of a node."""
    return labels is not None and labels.ndim == 2 and labels.shape[1] > 1


def is_graph(found: object) -> bool:
    """Whether an object is one that `arrays_of` takes."""
    return isinstance(found, Mapping) or _is_data(found) or _is_networkx(found)


def arrays_of(found: Any, where: str, like: Choices | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a graph file; InputError if there are others.

    Args:
        found: torch-geometric's `Data`, a NetworkX graph, or arrays by the names of a graph file.
        where: what messages begin with.
        like: choices for the attributes of NetworkX's nodes; None to make them.
    """
    if _is_networkx(found):
        return _of_networkx(found, where, like)
    table = found.to_dict() if _is_data(found) else dict(found)
    table = {
        name: value
        for name, value in table.items()
        if value is not None and name not in _FACTS_OF_DATA
    }
    unknown = [name for name in table if name not in KNOWN]
    if unknown:
        raise InputError(
            f"{where}: has {escaped(', '.join(map(str, unknown)))}, expected none but "
            f"{', '.join(KNOWN)}; leave out, or rename, what is not among them"
        )
    return {name: _array(name, value, where) for name, value in table.items()}


def _array(name: str, value: Any, where: str) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float() if value.dtype is torch.bfloat16 else value
        if value.layout is not torch.strided:
            raise InputError(
                f"{where}: {name} is a sparse tensor; give edge_index, or x_indptr and x_indices"
            )
        return value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(value, object)
    if array.dtype.kind not in "biufSU":
        raise InputError(
            f"{where}: {name} is {array.dtype} of shape {array.shape}, expected numbers or texts; "
            "make it an array of them"
        )
    return array


def _is_data(found: object) -> bool:
    return all(hasattr(found, name) for name in ("edge_index", "to_dict", "num_nodes"))


def _is_networkx(found: object) -> bool:
    return all(hasattr(found, name) for name in ("is_directed", "nodes", "edges", "adj"))


def _of_networkx(found: Any, where: str, like: Choices | None) -> dict[str, np.ndarray]:
    """Read a graph whose nodes have attributes: x, or columns as in a table of nodes."""
    nodes = {node: number for number, node in enumerate(found.nodes)}
    facts = [found.nodes[node] for node in nodes]
    texts = {"id": [str(node) for node in nodes]}
    for name in dict.fromkeys(name for of_node in facts for name in of_node):
        column = "label" if name == "y" else str(name)
        if column in texts:
            raise InputError(f"{where}: its nodes have two attributes '{column}'; leave one out")
        values = (of_node.get(name) for of_node in facts)
        texts[column] = ["" if name == "x" else _cell(v, column, where) for v in values]
    has_x = texts.pop("x", None) is not None
    bare = [number for number, of_node in enumerate(facts) if not of_node]
    if bare and len(bare) < len(facts):
        raise InputError(
            f"{where}: node '{escaped(texts['id'][bare[0]])}' has no attributes, and others have; "
            "give it some, or remove it"
        )
    table = Nodes(Rows(where, texts), Names(), None if has_x else like)
    arrays = table.arrays()
    if not has_x and not table.choices.width:
        raise InputError(
            f"{where}: its nodes have no features; give them x, or attributes to make some of"
        )
    if has_x and table.choices.width:
        raise InputError(
            f"{where}: its nodes have x, and beside it {first_few(table.choices.names)}; leave out "
            "x, or what is beside it"
        )
    if has_x:
        arrays["x"] = _array("x", [of_node.get("x") for of_node in facts], where)
    else:
        arrays["x"] = np.concatenate([*table.rows()])
        arrays[COLUMNS] = np.array([table.choices.as_text()])
    return arrays | _edges_of_networkx(found, nodes, where)


def _cell(value: Any, name: str, where: str) -> str:
    """Write an attribute as a cell of a table; InputError if it is neither a number nor text."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if value is not None and not isinstance(value, str | int | float):
        raise InputError(
            f"{where}: the attribute '{escaped(name)}' of a node is a {type(value).__name__}, "
            "expected a number or text; give vectors as x"
        )
    return "" if value is None else str(value)


def _edges_of_networkx(found: Any, nodes: Mapping[Any, int], where: str) -> dict[str, np.ndarray]:
    edges = list(found.edges(data="weight"))
    ends = np.array([(nodes[a], nodes[b]) for a, b, _ in edges], np.int64).reshape(-1, 2)
    weights = [weight for _, _, weight in edges]
    if not found.is_directed():
        is_other = ends[:, 0] != ends[:, 1]
        ends = np.concatenate((ends, ends[is_other, ::-1]))
        weights += [weights[edge] for edge in np.flatnonzero(is_other)]
    arrays = {"edge_src": ends[:, 0], "edge_dst": ends[:, 1]}
    num_without = sum(weight is None for weight in weights)
    if num_without == len(weights):
        return arrays
    if num_without:
        raise InputError(f"{where}: some edges have a weight and others none; give each one")
    return arrays | {"edge_weight": _array("edge_weight", weights, where)}
