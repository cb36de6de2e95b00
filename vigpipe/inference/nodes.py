"""Find nodes of a graph by their names, or by their numbers in the user's files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.untrusted import read_text
from vigpipe.graphs.graph import Graph

_MOST_BYTES = 1 << 30  # of a list of nodes
_MOST_DIGITS = 19


def nodes_in(text: str) -> list[str]:
    """Split a list of nodes, with commas between them, or read a .txt file with one a line."""
    if text.lower().endswith(".txt"):
        words = read_text(Path(text), _MOST_BYTES).removeprefix("\ufeff").splitlines()
    else:
        words = text.split(",")
    nodes = [word for word in words if word.strip()]
    if not nodes:
        raise InputError(
            f"--nodes {text}: names no node; give names or numbers with commas between them, or a "
            ".txt file with one a line"
        )
    return nodes


def find_nodes(words: Sequence[str], graph: Graph, option: str, data: str) -> np.ndarray:
    """Return the nodes that are called so, (m,) int64, in the same order; names come first.

    InputError, which begins with `option`, if there is no such node, several have the name, or a
    node is named twice.
    """
    place_of: dict[str, int] = {}
    again: dict[str, int] = {}  # the second node of a name
    for node, name in enumerate(graph.node_names or ()):
        if place_of.setdefault(name, node) != node:
            again.setdefault(name, node)
    places = None if graph.numbers is None else np.argsort(graph.numbers)
    found: dict[int, str] = {}
    for given in words:
        word = given if given in place_of else given.strip()
        node = place_of.get(word)
        if word in again:
            both = graph.numbers_of(np.array([place_of[word], again[word]])).tolist()
            raise InputError(
                f"{option} {escaped(word)}: {data} has several nodes of that name, expected one; "
                f"give the number, such as {both[0]} or {both[1]}"
            )
        is_number = word.isdecimal() and len(word) < _MOST_DIGITS
        if node is None and is_number and int(word) < graph.num_nodes:
            node = int(word) if places is None else int(places[int(word)])
        if node is None:
            raise InputError(
                f"{option} {escaped(word)}: {data} has no such node; give a number from 0 to "
                f"{graph.num_nodes - 1}{', or a name' if place_of else ''}"
            )
        if node in found:
            raise InputError(
                f"{option} {escaped(word)}: is the same node as {escaped(found[node])}; name it "
                "once"
            )
        found[node] = word
    return np.array([*found])
