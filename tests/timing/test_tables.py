"""From rows to tables: statistics, the slowest rank, the order of the lines, the study's table."""

import csv
import math
from dataclasses import asdict, astuple, fields, replace

import pytest

from vigpipe.timing.recorder import Row
from vigpipe.timing.tables import (
    slowest,
    statistics,
    step_statistics,
    study_table,
    tables,
    write_rows,
)

ROW = Row("train", 1, 0, 0, -1, "step", "", 1, 1.0)


def row(name: str, seconds: float, **others) -> Row:
    return replace(ROW, name=name, seconds=seconds, **others)


# ---- statistics ------------------------------------------------------------------------------


def test_statistics_by_hand():
    found = statistics([4.0, 1.0, 3.0, 2.0])
    assert asdict(found) == {
        "mean": 2.5,
        "std": pytest.approx(math.sqrt(5 / 3)),
        "min": 1.0,
        "max": 4.0,
        "median": 2.5,
        "p95": pytest.approx(3.85),
        "count": 4,
    }


def test_a_single_value_has_no_spread():
    assert astuple(statistics([0.25])) == (0.25, 0.0, 0.25, 0.25, 0.25, 0.25, 1)


# ---- the slowest rank ------------------------------------------------------------------------


def test_a_step_lasts_as_long_as_its_slowest_rank():
    seconds = {1: (1.0, 1.5, 1.2), 2: (2.0, 1.0, 0.5), 4: (3.0, 3.5, 4.0)}
    rows = [
        row("step", value, step=step, rank=rank)
        for step, values in seconds.items()
        for rank, value in enumerate(values)
    ]
    rows += [row("step", 9.0, phase="test"), row("forward", 8.0)]
    assert slowest(rows, "train")[-1, "step", ""] == [1.5, 2.0, 4.0]
    found = step_statistics(rows, "train")
    assert found is not None
    assert (found.count, found.max, found.median) == (3, 4.0, 2.0)
    test = step_statistics(rows, "test")
    assert test is not None
    assert (test.count, test.mean) == (1, 9.0)


def test_stages_and_directions_are_apart_and_replicas_are_not():
    rows = [
        row("block 0", 1.0, stage=0, direction="forward", replica=0),
        row("block 0", 2.0, stage=0, direction="forward", replica=1, rank=2),
        row("block 0", 5.0, stage=0, direction="backward"),
        row("block 0", 7.0, stage=1, direction="forward"),
    ]
    assert slowest(rows, "train") == {
        (0, "block 0", "forward"): [2.0],
        (0, "block 0", "backward"): [5.0],
        (1, "block 0", "forward"): [7.0],
    }


# ---- files and tables ------------------------------------------------------------------------


def test_rows_are_read_back_from_csv(tmp_path):
    rows = [
        row("block 3/grapher", 0.123456789, stage=1, direction="backward", count=5),
        row('a "name", with a comma', 1e-9, phase="test", step=7, rank=3, replica=1),
    ]
    path = tmp_path / "timing.csv"
    write_rows(rows, path)
    with path.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == [field.name for field in fields(Row)]
    for line, expected in zip(found, [asdict(given) for given in rows], strict=True):
        assert float(line.pop("seconds")) == expected.pop("seconds")
        assert line == {name: str(value) for name, value in expected.items()}


RUN = [
    row("step", 0.5),
    row("forward", 0.1, stage=0),
    row("backward", 0.2, stage=0),
    row("optimizer", 0.01),
    *[
        row(name, 0.01, stage=0, direction=direction)
        for name in ("loss", "readout", "block 10", "block 2/ffn", "block 2", "block 2/grapher")
        for direction in ("backward", "forward")
    ],
    row("stem", 0.004, stage=0, direction="forward"),
    row("step", 0.25, phase="test"),
    row("forward", 0.125, stage=0, phase="test"),
]


def cells(text: str) -> list[list[str]]:
    """Of a Markdown table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_lines_come_in_the_order_of_a_step():
    found = cells(tables(RUN))
    names = [(line[1], line[2]) for line in found if line[0] in ("", "0") and "." in line[3]]
    regions = ["block 2", "block 2/ffn", "block 2/grapher", "block 10", "readout", "loss"]
    assert names == [
        ("step", ""),
        ("optimizer", ""),
        ("forward", ""),
        ("backward", ""),
        ("stem", "forward"),
        *[(name, direction) for name in regions for direction in ("forward", "backward")],
        ("step", ""),
        ("forward", ""),
    ]


def test_tables_are_in_milliseconds_with_every_statistic():
    rows = [row("step", seconds, step=i) for i, seconds in enumerate((0.001, 0.002, 0.006))]
    (line,) = [line for line in cells(tables(rows)) if line[1] == "step"]
    assert line == ["", "step", "", "3.000", "2.646", "1.000", "6.000", "2.000", "5.600", "3"]


def test_phases_without_rows_have_no_table():
    assert tables([]) == ""
    assert step_statistics([], "train") is None
    assert "Test batches" not in tables([ROW])
    assert "Training steps" not in tables([replace(ROW, phase="test")])


def test_the_studys_table():
    rows = [
        *[row("step", s, step=i) for i, s in enumerate((1.0, 3.0))],
        *[row("forward", s, step=i, stage=1, rank=1) for i, s in enumerate((0.25, 0.5))],
        *[row("backward", s, step=i, stage=1, rank=1) for i, s in enumerate((0.5, 0.75))],
        *[
            row(name, s, step=i, stage=1, direction="forward")
            for name, seconds in (("block 4", (0.1, 0.2)), ("block 5", (0.3, 0.4)))
            for i, s in enumerate(seconds)
        ],
        *[row("block 5", 9.0, step=i, stage=1, direction="backward") for i in range(2)],
        *[row("block 5/ffn", 9.0, step=i, stage=1, direction="forward") for i in range(2)],
        row("readout", 0.05, stage=1, direction="forward"),
        row("step", 0.7, phase="test"),
    ]
    assert cells(study_table(rows, "github"))[2:] == [
        ["train", "mini-batch", "2.0000", "1.4142", "1.0000", "3.0000", "2"],
        ["train", "stage 1, computing", "1.0000", "0.3536", "0.7500", "1.2500", "2"],
        ["train", "one block, forward", "0.2500", "0.1291", "0.1000", "0.4000", "4"],
        ["train", "readout, forward", "0.0500", "0.0000", "0.0500", "0.0500", "1"],
        ["test", "mini-batch", "0.7000", "0.0000", "0.7000", "0.7000", "1"],
    ]
