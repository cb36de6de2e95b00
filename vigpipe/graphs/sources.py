"""Where a graph comes from: a file, a prepared folder, a known data set, or a random draw."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from vigpipe.config.options import as_given
from vigpipe.config.prepared import is_prepared
from vigpipe.errors import InputError
from vigpipe.graphs import sbm
from vigpipe.graphs.features import Scaling, fitted_weights, scaled
from vigpipe.graphs.formats import graph_file, named
from vigpipe.graphs.graph import Graph
from vigpipe.graphs.graph import symmetric as both_directions
from vigpipe.graphs.prepared.graph import PreparedGraph
from vigpipe.graphs.prepared.read import open_folder
from vigpipe.graphs.stored_rows import StoredRows
from vigpipe.launch.failures import reading

SUFFIX = ".npz"


def open_graph(
    data: str,
    *,
    data_dir: Path,
    download: bool,
    features: Scaling | None,
    symmetric: bool | None,
    seed: int,
    feature_weights: np.ndarray | None = None,
    multi_label: bool = False,
    trains: bool = True,
) -> Graph:
    """Open a graph to train on, or to use a model on; InputError if there is none.

    `data` is the path of a graph file, which ends in .npz, or of a prepared folder; the name of a
    data set, in any case; or `sbm.FORM` for a random graph, drawn from the seed. Data sets are in
    folders of their own in `data_dir`. `download` fetches one that is not there; in a run, one rank
    does so before the others open the graph. Scaled features (`features.scaled`) and edges with
    their reverse are by default as a folder has them, otherwise raw and symmetric. A model that was
    trained with tf-idf brings the weights of the features; by default they are fitted.
    `multi_label` asks for a graph of which a node may have several classes. A graph file that is
    not trained on may lack labels and split; see `make_graph`.
    """
    where = f"--data {data}"
    with reading(where):
        # Path's own expanduser raises RuntimeError for an unknown ~user.
        path = Path(os.path.expanduser(data))
        if is_prepared(data):
            graph = _as_prepared(open_folder(path), features, symmetric)
            _check_kind(graph, data, multi_label)
            _check_weights(graph, feature_weights)
            return graph
        if data.startswith(sbm.PREFIX):
            graph = sbm.draw(data, seed)
        elif data.lower().endswith(SUFFIX):
            graph = graph_file.read(path, multi_label=multi_label, trains=trains)
        elif data.lower() in named.DATA_SETS:
            graph = named.read(named.DATA_SETS[data.lower()], data_dir, download=download)
        else:
            if path.is_file():
                raise InputError(
                    f"--data {data}: is not a graph file (*{SUFFIX}); make one as "
                    "docs/graph-data.md says"
                )
            names = ", ".join(data_set.name for data_set in named.DATA_SETS.values())
            raise InputError(
                f"--data {data}: no such graph; give one of {names}, a graph file (*{SUFFIX}), a "
                f"prepared folder or {sbm.FORM}"
            )
        _check_kind(graph, data, multi_label)
        graph = _scaled(graph, features or "raw", where, feature_weights)
        if symmetric is not False:
            graph = both_directions(graph)
        return graph


def _scaled(graph: Graph, scaling: Scaling, where: str, weights: np.ndarray | None) -> Graph:
    """Scale the features of a graph, with tf-idf by these weights or those that are fitted."""
    raw = graph.features
    assert not isinstance(raw, StoredRows)
    if scaling != "tfidf":
        return replace(graph, features=scaled(raw, scaling, where))
    if weights is None:
        weights = fitted_weights(raw, where)
    elif len(weights) != graph.num_features:
        raise InputError(
            f"{where}: has {graph.num_features} features, but the model was trained on "
            f"{len(weights)}; give a graph with the same features"
        )
    features = scaled(raw, scaling, where, weights)
    return replace(graph, features=features, feature_weights=weights)


def _check_kind(graph: Graph, data: str, multi_label: bool) -> None:
    if multi_label and not graph.is_multi_label:
        raise InputError(
            f"--data {data}: has one class a node, but --multi-label, or a model of several "
            "classes a node, needs zeros and ones of shape (n, C); save the labels so, or leave "
            "the option out"
        )


def _as_prepared(
    graph: PreparedGraph, features: Scaling | None, symmetric: bool | None
) -> PreparedGraph:
    has = graph.manifest
    for option, wanted, found in (
        ("features", features, has.scaling),
        ("symmetric", symmetric, has.symmetric),
    ):
        if wanted not in (None, found):
            raise InputError(
                f"--data {graph.name}: was prepared with {as_given(option, found)}, but "
                f"{as_given(option, wanted)} is asked for; leave it out, or prepare another folder"
            )
    return graph


def _check_weights(graph: PreparedGraph, wanted: np.ndarray | None) -> None:
    """Raise InputError if a folder was prepared with other weights of features than a model's."""
    if graph.manifest.scaling != "tfidf":
        return
    if graph.feature_weights is None:
        raise InputError(
            f"--data {graph.name}: does not keep the weights of its features, as folders of older "
            "versions do not; prepare it anew"
        )
    if wanted is not None and not np.array_equal(wanted, graph.feature_weights):
        raise InputError(
            f"--data {graph.name}: was prepared with other tf-idf weights than the model was "
            "trained with; give the graph that the folder was made of"
        )
