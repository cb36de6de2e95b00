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
    ]
    make: Any = partial(create_graph_model, in_channels=9, num_classes=5, num_layers=2, width=8)
    check_refusals((partial(make, name, **options), words) for name, options, words in rows)
