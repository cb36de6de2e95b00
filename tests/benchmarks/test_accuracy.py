"""The page about a run: its scores beside those of raw pixels."""

import csv
import json
import tomllib

import numpy as np
import pytest
from PIL import Image

from benchmarks.cli import main

pytestmark = pytest.mark.heavy


def scores(top1, top5):
    return {"top1": top1, "top5": top5}


@pytest.fixture
def run(tmp_path):
    """A finished run of two epochs on the digits, a fifth of which were held out."""
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [
        {"step": 1, "epoch": 1, "loss": 2.0},
        {"step": 2, "epoch": 1, "loss": 1.0},
        {"epoch": 1, "loss": 1.5, **scores(0.5, 0.8), "ema": scores(0.4, 0.7)}
        | {"validation": scores(0.25, 0.75)},
        {"step": 3, "epoch": 2, "loss": 0.5},
        {"epoch": 2, "loss": 0.9, **scores(0.75, 0.875), "ema": scores(0.625, 0.8125)}
        | {"validation": scores(0.5, 0.9375)},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "model": "vig_digits", "data": "digits", "test": {"images": 360}, "steps": 3,
        "wall_seconds": 90.0, "commit": "c0ffee", "hardware": "a computer", "threads_per_rank": 1,
        "layout": {"ranks": 2}, "versions": {"vigpipe": "1"},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    config = 'data = "digits"\ndata_dir = "data"\nout = "/somewhere"\nvalidation = 0.2\n'
    (folder / "config.toml").write_text(config)
    return folder


def test_the_page_has_the_last_scores_and_the_baselines(run, tmp_path, capsys):
    out = tmp_path / "page"
    assert main(["accuracy", "--run", str(run), "--out", str(out)]) == 0
    page = (out / "README.md").read_text()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert table[4:7] == [
        ["trained weights", "75.0%", "87.5%"],
        ["their moving average", "62.5%", "81.2%"],
        ["trained weights on the validation images", "50.0%", "93.8%"],
    ]
    assert "360 test images, 1150 training images, 3 steps in 1.5 minutes" in page
    assert "c0ffee" in page
    pixels = table[7:9]
    assert [row[0] for row in pixels] == ["kNN on pixels", "linear classifier on pixels"]
    assert all(float(row[1].rstrip("%")) > 80 for row in pixels)
    assert "kNN on pixels" in capsys.readouterr().out
    rows = list(csv.DictReader((out / "rows.csv").read_text().splitlines()))
    assert [(r["epoch"], r["training_loss"], r["ema_top1"]) for r in rows] == [
        ("1", "1.5", "0.4"),
        ("2", "0.5", "0.625"),
    ]
    assert "out" not in tomllib.loads((out / "config.toml").read_text())
    pixels = np.asarray(Image.open(out / "curve.png").convert("RGB"))
    assert pixels.std() > 10  # something is drawn
