"""Choices that a model does not have are refused, in one sentence."""

from functools import partial
from typing import Any

from tests.refusals import check_refusals
from vigpipe.model.gnn.create import create_graph_model


def test_choices_that_a_model_does_not_have():
    rows: list[Any] = [
        ("gcn", {"heads": 2}, "--heads 2: is for gat, and --model is gcn"),
        ("gat", {"heads": 3}, "--width 8 with --heads 3: .* take a multiple of 3"),
        ("gcn", {"aggregator": "max"}, "--aggregator max: gcn has no choice"),
        ("sage", {"aggregator": "lstm"}, "--aggregator lstm: sage has mean, max, pool"),
        ("gat", {"aggregator": "mean"}, "--aggregator mean: gat has v1, v2"),
    ]
    make: Any = partial(create_graph_model, in_channels=9, num_classes=5, num_layers=2, width=8)
    check_refusals((partial(make, name, **options), words) for name, options, words in rows)


def test_the_width_is_that_of_all_heads_and_the_last_layer_has_one():
    model: Any = create_graph_model(
        "gat", in_channels=9, num_classes=5, num_layers=3, width=8, heads=4
    )
    shapes = [tuple(layer.att_src.shape) for layer in model.convs.values()]
    assert shapes == [(1, 4, 2), (1, 4, 2), (1, 1, 5)]
    assert [model.boundary_shape(i) for i in range(4)] == [(9,), (8,), (8,), (5,)]
