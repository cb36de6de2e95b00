"""Sub-networks against a model as a whole, in a run of each."""

import csv
import sys

import pytest

from tests.world import run_command

pytestmark = pytest.mark.heavy


@pytest.mark.multiprocess
def test_real_runs_end_in_a_table(tmp_path):
    out = tmp_path / "out"
    options = "--data sbm:200,4 --depths 3 --samplers full@4 --replicas 2 --intervals 1 --seeds 1"
    words = ["subnetworks", *options.split(), "--width", "8", "--out", str(out)]
    done = run_command([sys.executable, "-m", "benchmarks", *words])
    assert done.returncode == 0, done.stderr
    with (out / "rows.csv").open(newline="") as file:
        whole, halves = csv.DictReader(file)
    assert (whole["steps"], halves["steps"]) == ("4", "2")
    assert whole["round_bytes"] == whole["own_accuracy"] == ""
    assert float(halves["round_bytes"]) > 0 < float(halves["own_accuracy"]) < 1
    assert (halves["rounds"], halves["untrained"]) == ("2", "0.25")
    assert "3 layers, full@4, m = 2, rounds of 1 steps, seed 0: test accuracy" in done.stdout
