"""A random graph whose classes can be found: for tests, and to try the program without data."""

import numpy as np

from vigpipe.errors import InputError
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION, Graph, in_rows

PREFIX = "sbm:"
FORM = "sbm:NODES[,CLASSES[,FEATURES[,DEGREE]]]"
_DEFAULTS = (10, 64, 10)  # classes, features, mean degree
_WITHIN = 0.8  # the fraction of edges that are drawn within a class
_NOISE = 3.0  # standard deviation of a feature within a class; that of the classes' means is 1
_MOST = 1 << 31  # bounds n times features, and n times degree


def draw(name: str, seed: int) -> Graph:
    """Draw a stochastic block model: an undirected graph with more edges within classes.

    The classes have equally many nodes, one more or less. Four of five edges join two random nodes
    of a class, and the others any two nodes; loops and repetitions are left out. The features of a
    node are the mean of its class, each drawn from N(0, 1), and noise from N(0, 9). In each class
    three of five nodes are for training, and one each for validation and for test.

    Source: Holland, Laskey, Leinhardt, Stochastic blockmodels: First steps, Social Networks 1983,
    with the number of edges fixed instead of drawn.

    The name has the FORM, where DEGREE is the mean number of neighbours before repetitions are left
    out; InputError for other names, and for numbers that are too small or too large. With one
    version of NumPy, the same seed draws the same graph.
    """
    num_nodes, num_classes, num_features, degree = _parse(name)
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_nodes)
    labels = np.empty(num_nodes, np.int64)
    labels[order] = np.arange(num_nodes) % num_classes
    split = np.empty(num_nodes, np.int8)
    parts = np.array((TRAIN, TRAIN, TRAIN, VALIDATION, TEST), np.int8)
    split[order] = parts[np.arange(num_nodes) // num_classes % 5]

    indptr, indices, _ = in_rows(
        *_draw_edges(order, num_classes, degree, generator), num_nodes, both_ways=True
    )

    means = generator.standard_normal((num_classes, num_features), np.float32)
    features = generator.standard_normal((num_nodes, num_features), np.float32)
    features *= _NOISE
    for label in range(num_classes):
        features[labels == label] += means[label]
    names = tuple(str(label) for label in range(num_classes))
    return Graph(name, indptr, indices, features, labels, split, names)


def _draw_edges(
    order: np.ndarray, num_classes: int, degree: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the two ends of every edge; the i-th node of `order` has the class i % C."""
    num_nodes = len(order)
    num_edges = num_nodes * degree // 2
    firsts = generator.integers(num_nodes, size=num_edges)
    others = generator.integers(num_nodes, size=num_edges)
    within = generator.random(num_edges) < _WITHIN
    classes = firsts % num_classes
    sizes = (num_nodes - classes + num_classes - 1) // num_classes
    mates = generator.integers(sizes)
    del sizes
    mates *= num_classes
    mates += classes
    others[within] = mates[within]
    del mates, classes, within
    ends = order[firsts], order[others]
    is_edge = ends[0] != ends[1]
    return ends[0][is_edge], ends[1][is_edge]


def _parse(name: str) -> tuple[int, int, int, int]:
    words = name.removeprefix(PREFIX).split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 12 for word in words) or (
        len(words) > 1 + len(_DEFAULTS)
    ):
        raise InputError(f"--data {name}: expected whole numbers as {FORM}, such as sbm:10000,10")
    given = tuple(int(word) for word in words)
    numbers = (*given, *_DEFAULTS[len(given) - 1 :])
    num_nodes, num_classes, num_features, degree = numbers
    if min(numbers) < 1 or num_nodes < 5 * num_classes:
        raise InputError(
            f"--data {name}: every number is at least 1, and a class has at least 5 nodes (got "
            f"{num_nodes} nodes in {num_classes} classes); choose more nodes"
        )
    if num_nodes * max(num_features, degree) > _MOST:
        raise InputError(
            f"--data {name}: nodes times features, and nodes times degree, are at most {_MOST}; "
            "choose smaller numbers"
        )
    return num_nodes, num_classes, num_features, degree
