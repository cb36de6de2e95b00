"""The comparison of ways to sample a graph: what each run has learned at its best epoch."""

import csv
import json
import sys

import pytest

from benchmarks.options import SamplersBench
from benchmarks.samplers import read
from benchmarks.trained import TrainedRun
from tests.world import run_command

pytestmark = pytest.mark.heavy


def test_what_counts_is_the_test_score_at_the_best_validation_epoch(tmp_path):
    rows = [
        {"step": 1, "epoch": 1, "step_seconds": 3.0, "data_seconds": 1.0},
        {"epoch": 1, "accuracy": 0.5, "macro_f1": 0.4, "validation": {"accuracy": 0.7}},
        {"step": 2, "epoch": 2, "step_seconds": 5.0, "data_seconds": 1.0},
        {"epoch": 2, "accuracy": 0.9, "macro_f1": 0.8, "validation": {"accuracy": 0.6}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    partition = {"seconds": 1.5, "read_seconds": 0.125, "kept_edge_fraction": 0.1}
    graph = {"kept_edge_fraction": 0.25, "sampler_seconds": 2.0, "partition": partition}
    run = TrainedRun("metis with seed 3", "metis-3", {}, ("metis", 3))
    found = read(SamplersBench(), run, tmp_path, {"steps": 4, "peak_bytes": 7, "graph": graph})
    # Seconds of an epoch: 4.0 and 6.0.
    assert found == ("metis", 3, 0.5, 0.4, 1, 4, 0.25, 1.5, 0.125, 5.0, 7)


@pytest.mark.multiprocess
def test_real_runs_end_in_a_table(tmp_path):
    out = tmp_path / "out"
    ways = "full@2,random:4@1,saint-walk@1"
    words = f"samplers --data sbm:200,4 --ways {ways} --seeds 1 --roots 30 --width 8".split()
    words += ["--threads", "1", "--out", str(out)]
    done = run_command([sys.executable, "-m", "benchmarks", *words])
    assert done.returncode == 0, done.stderr
    with (out / "rows.csv").open(newline="") as file:
        full, random, walk = csv.DictReader(file)
    assert (full["steps"], random["steps"]) == ("2", "4")
    assert float(full["kept_edges"]) == 1.0
    assert all(float(row["preparation_seconds"]) > 0 for row in (full, random, walk))
    assert full["read_seconds"] == random["read_seconds"] == "" < walk["read_seconds"]
    assert 0.1 < float(random["kept_edges"]) < 0.45 < float(walk["kept_edges"]) < 1
    page = (out / "README.md").read_text()
    assert "| full@2" in page
    assert "random:4@1 with seed 0: accuracy" in done.stdout
