"""What the figures hold; how they look in a browser is the page's test."""

import json
from collections import Counter

import numpy as np
import pytest
from plotly.io import to_json

from tests.report.runs import gpipe, shared_run
from vigpipe.analysis.account import PARTS
from vigpipe.report import charts
from vigpipe.report.read import read_runs
from vigpipe.report.timing_files import Timeline
from vigpipe.spans import KINDS, Span, SpanKind


def traces(figure):
    return json.loads(str(to_json(figure)))["data"]


def test_a_timeline_of_thousands_of_boxes_is_one_trace_a_kind_and_panel():
    measured, predicted = tuple(gpipe(8, 1, 64, 1.2)), tuple(gpipe(8, 1, 64, 1.0))
    drawn = traces(charts.timeline_chart(Timeline(7, 64, 0.0, measured, predicted)))
    assert len(drawn) <= 2 * len(KINDS)
    for panel, spans in (("x", measured), ("x2", predicted)):
        own = [trace for trace in drawn if trace.get("xaxis", "x") == panel]
        numbers = Counter({trace["name"]: len(trace["x"]) for trace in own})
        assert numbers == Counter(span.kind for span in spans)
    shown = [trace["name"] for trace in drawn if trace["showlegend"]]
    assert len(shown) == len(set(shown))


def test_a_box_lies_where_the_span_was():
    spans = (Span(0, "forward", 5.0, 5.5, 0, 0), Span(1, "forward", 5.5, 6.5, 1, 0))
    figure = charts.timeline_chart(Timeline(7, 1, 0.0, spans, ()))
    (boxes,) = traces(figure)
    assert boxes["y"] == [0, 1]
    assert boxes["base"] == [0.0, 500.0]  # milliseconds since the first span
    assert boxes["x"] == [500.0, 1000.0]
    assert boxes["text"] == ["0", "0"]
    assert boxes["hovertext"][1] == (
        "rank 1: forward, stage 1, micro-batch 0<br>500.000 – 1500.000 ms, 1000.000 long"
    )
    first, last = figure.to_dict()["layout"]["yaxis"]["range"]
    assert first > 1 > 0 > last  # rank 0 on top


def test_a_prediction_of_one_replica_has_no_empty_rows():
    timeline = Timeline(7, 2, 0.0, tuple(gpipe(2, 2, 2, 1.0)), tuple(gpipe(2, 1, 2, 1.0)))
    layout = charts.timeline_chart(timeline).to_dict()["layout"]
    assert list(layout["yaxis"]["tickvals"]) == [0, 1, 2, 3]
    assert list(layout["yaxis2"]["tickvals"]) == [0, 1]
    heights = [np.ptp(layout[axis]["domain"]) for axis in ("yaxis", "yaxis2")]
    assert heights[0] == pytest.approx(2 * heights[1])
    titles = [title["text"] for title in layout["annotations"]]
    assert titles == ["measured, step 7", "predicted, one replica"]


def test_a_rank_s_bar_is_made_of_all_parts():
    (run,) = read_runs([shared_run()])
    assert run.timing is not None
    drawn = traces(charts.account_chart(run.timing.accounts))
    assert [trace["name"] for trace in drawn] == list(PARTS)
    for i, account in enumerate(run.timing.accounts):
        total = sum(trace["x"][i] for trace in drawn)
        assert total == pytest.approx(1e3 * account.step_seconds)


def test_pieces_of_the_model_stand_in_its_order():
    stacked: dict[SpanKind, dict[str, dict[str, float]]] = {
        "forward": {"FFN": {"block 2": 1.0, "block 10": 1.0}, "whole": {"loss": 0.1, "stem": 0.1}},
        "backward": {"whole": {"stem": 0.2}},
    }
    figure = charts.piece_chart(stacked)
    layout = figure.to_dict()["layout"]
    assert list(layout["xaxis"]["categoryarray"]) == ["stem", "2", "10", "loss"]
    assert list(layout["xaxis2"]["categoryarray"]) == ["stem"]
    assert [(t["name"], t["y"]) for t in traces(figure)] == [
        ("FFN", [1000.0, 1000.0]),
        ("whole", [100.0, 100.0]),
        ("whole", [200.0]),
    ]
