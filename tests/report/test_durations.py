"""Which rows the tables have, in which order, and what the charts stack."""

import pytest

from vigpipe.report import durations

SECONDS = {
    (1, "loss", "forward"): [0.01],
    (1, "readout", "forward"): [0.02],
    (1, "block 10", "forward"): [0.30],
    (1, "block 10/grapher", "forward"): [0.20],
    (0, "block 2", "backward"): [0.5],
    (0, "block 2", "forward"): [0.10, 0.20],
    (0, "block 2/ffn", "forward"): [0.05],
    (0, "block 2/grapher", "forward"): [0.08],
    (0, "block 2/grapher/knn", "forward"): [0.03],
    (0, "block 2/grapher/aggregation", "forward"): [0.04],
    (0, "stem", "forward"): [0.05],
}


def names(rows):
    return "; ".join(f"{place}: {name}" for place, name, _ in rows)


def test_parts_are_pooled_over_the_blocks():
    rows = durations.part_rows(SECONDS)
    assert names(rows) == (
        "stem: forward; one block: forward; one block: backward; Grapher: forward; kNN: "
        "forward; aggregation: forward; FFN: forward; readout: forward; loss: forward"
    )
    assert rows[1][2].mean == pytest.approx(0.2)
    assert rows[1][2].count == 3


def test_what_is_stacked_adds_up_to_the_median():
    stacked = durations.stacked_medians(SECONDS, "forward")
    total: dict[str, float] = {}
    for own in stacked.values():
        for piece, seconds in own.items():
            total[piece] = total.get(piece, 0.0) + seconds
    assert total == pytest.approx(
        {"stem": 0.05, "block 2": 0.15, "block 10": 0.30, "readout": 0.02, "loss": 0.01}
    )
    assert stacked["rest of the Grapher"] == pytest.approx({"block 2": 0.01, "block 10": 0.20})
    assert stacked["whole"] == {"stem": 0.05, "readout": 0.02, "loss": 0.01}
    assert durations.stacked_medians(SECONDS, "backward") == {"whole": {"block 2": 0.5}}


def test_a_layer_of_a_graph_model_has_parts_of_its_own():
    seconds = {
        (0, "block 0", "forward"): [0.5],
        (0, "block 0/aggregation", "forward"): [0.3],
        (0, "block 0/update", "forward"): [0.15],
        (1, "loss", "forward"): [0.01],
    }
    assert durations.has_layers(seconds)
    assert not durations.has_layers(SECONDS)
    assert durations.stacked_medians(seconds, "forward") == {
        "aggregation": {"block 0": 0.3},
        "update": {"block 0": 0.15},
        "rest of the block": {"block 0": pytest.approx(0.05)},
        "whole": {"loss": 0.01},
    }
