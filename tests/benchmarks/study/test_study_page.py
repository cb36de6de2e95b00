"""The page, its tables, rows and plot, from numbers that were never measured."""

import csv

import numpy as np
import pytest
from PIL import Image

from benchmarks.study.outcome import write_rows
from benchmarks.study.page import write_page
from benchmarks.study.plot import draw_losses
from benchmarks.study.tables import (
    block_table,
    bubble_table,
    inference_table,
    speedup_table,
    step_table,
)
from tests.benchmarks.study.outcomes import STEPS, make_outcome

ALL = {
    "sequential": 4.0,
    "accumulated-5": 3.0,
    "accumulated-10": 3.5,
    "2x5": 2.0,
    "4x5": 1.6,
    "2x2x5": 1.4,
}


def cells(table, name):
    """Of the first line about a layout."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_step_stands_beside_the_published_one():
    outcome = make_outcome(ALL, num_cores=2, rounds=(1.0, 2.0))
    table = step_table(outcome)
    name, ranks, published, mean, std, least, most, middle, count, simulated = cells(table, "2x5")
    assert (name, ranks, published, count) == ("2x5", "2", "19.02", "6")
    assert (mean, least, most, middle) == ("3.0000", "1.8000", "4.4000", "2.9000")
    assert float(std) == pytest.approx(np.std([1.8, 2, 2.2, 3.6, 4, 4.4], ddof=1), abs=1e-4)
    # 6 turns of 4 blocks on 8 rows: 1 ms a row forward and 2 ms backward.
    assert float(simulated) == pytest.approx(6 * 4 * 8 * 3e-3, rel=0.01)
    assert cells(table, "4x5")[1] == "4 on 2 cores"
    assert cells(table, "accumulated-5")[2] == "–"


def test_speed_ups_are_against_both_baselines():
    table = speedup_table(make_outcome(ALL, rounds=(1.0, 2.0)))
    assert cells(table, "2x5")[2:6] == ["1.97×", "2.00× (2.00 – 2.00)", "1.50× (1.50 – 1.50)",
                                        "1.67×"]  # fmt: skip
    assert cells(table, "2x2x5")[3:6] == ["2.86× (2.86 – 2.86)", "2.50× (2.50 – 2.50)", "3.33×"]
    assert cells(table, "accumulated-5")[2:] == ["–", "1.33× (1.33 – 1.33)", "–", "–", "–"]
    assert "| sequential" not in table
    # A baseline that was not run leaves a gap, but is simulated.
    line = cells(speedup_table(make_outcome({"2x5": 2.0})), "2x5")
    assert line[3:6] == ["–", "–", "1.67×"]
    assert line[6] == "1.67×"  # the ceiling: all transfers but two are hidden


def test_bubble_prediction_and_memory():
    table = bubble_table(make_outcome(ALL, num_cores=2))
    _, ranks, bubble, formula, step, here, off, apart, peaks = cells(table, "4x5")
    assert (ranks, bubble, formula) == ("4 on 2 cores", "25.0%", "37.5%")
    assert (step, peaks) == ("1.6000", "100, 200, 300, 400")
    assert float(here) > 1.3 * float(apart) > 0  # four ranks take turns on two cores
    assert off == f"{float(here) / 1.6 - 1:+.1%}"
    assert cells(table, "sequential")[2:4] == ["–", "–"]


def test_blocks_and_readout_are_in_the_studys_shape():
    table = block_table(make_outcome(ALL))
    assert cells(table, "published") == ["published", "train", "1.95", *[""] * 9]
    assert cells(table, "sequential")[1:7] == ["train", "0.2500", "0.0000", "0.2500", "0.2500", "8"]
    assert "0.0040" in table


def test_inference_has_latency_and_throughput():
    line = cells(inference_table(make_outcome(ALL)), "2x2x5")
    assert line[2:5] == ["2", "5", "2"]
    assert line[5:] == ["350.0 (315.0 – 385.0)", "466.7", "114.3", "2.50×"]


def test_the_page_says_where_its_numbers_come_from(tmp_path):
    outcome = make_outcome(ALL, num_cores=2, rounds=(1.0, 1.25))
    write_page(outcome, tmp_path, ["study", "--batch", "40"], "vigpipe time --stages S", "pictures")
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.startswith("# The study's experiment: vig_study on pictures, 2 cores\n")
    assert "**The ranks of 4x5, 2x2x5 outnumber the 2 cores**" in page
    for part in ("`python -m benchmarks study --batch 40`", "`vigpipe time --stages S`",
                 "commit: c0ffee", "A processor, 2 cores; 1 thread", "torch 2.15.0",
                 "warm-up: 2 steps", "2 rounds", "differ by up to 25.0%"):  # fmt: skip
        assert part in page
    assert page.count("c0ffee") == 1
    assert "nan" not in page.lower().split()


def test_a_page_of_one_round_on_enough_cores_warns_of_nothing(tmp_path):
    write_page(make_outcome({"sequential": 1.0}), tmp_path, ["study"], "", "pictures")
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "outnumber" not in page
    assert "- 1 round:" in page
    assert "between rounds" not in page


def test_rows_have_every_step(tmp_path):
    outcome = make_outcome({"sequential": 1.0, "2x5": 2.0}, rounds=(1.0, 2.0))
    write_rows(outcome, tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    first = [row for row in rows if (row["round"], row["config"]) == ("1", "2x5")]
    train = {r["step"]: (r["loss"], r["step_seconds"]) for r in first if r["phase"] == "train"}
    assert train["1"] == ("3.0", "")
    assert train["3"] == ("1.0", "1.800000000")
    test = [(int(r["step"]), r["loss"], float(r["step_seconds"])) for r in first[len(train) :]]
    assert test == [(s, "", t) for s, t in zip(STEPS, (0.45, 0.5, 0.55), strict=True)]
    assert [(r["round"], r["config"]) for r in rows[:: len(first)]] == [
        ("1", "sequential"), ("1", "2x5"), ("2", "sequential"), ("2", "2x5")]  # fmt: skip


def test_the_plot_shows_every_layout(tmp_path):
    path = tmp_path / "loss.png"
    draw_losses(make_outcome({name: ALL[name] for name in ("sequential", "2x2x5")}), path)
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[1] > 1000
    assert (pixels != 255).any(2).mean() > 0.01
