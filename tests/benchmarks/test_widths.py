"""Sub-networks by the width of their model: what runs, what does not fit, and one of them alone."""

import csv
import sys

import pytest

from tests.world import run_command

pytestmark = pytest.mark.heavy


@pytest.mark.multiprocess
def test_real_runs_end_in_a_table(tmp_path):
    out = tmp_path / "out"
    options = "--data sbm:200,4 --widths 8,9 --replicas 1,2 --steps 2 --average-every 1"
    words = ["widths", *options.split(), "--alone-width", "8", "--repeats", "1"]
    done = run_command([sys.executable, "-m", "benchmarks", *words, "--out", str(out)])
    assert done.returncode == 0, done.stderr
    with (out / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs, steps = rows[:4], rows[4:]
    assert [row["exit_code"] for row in runs] == ["0", "0", "0", "2"]
    assert all(float(row["peak_bytes"]) > 1e6 for row in runs[:3])
    assert [row["what"] for row in steps] == ["step alone", "without optimizer"] * 2
    page = (out / "README.md").read_text()
    assert "refused: --dp 2: --strategy subnetworks divides 9 channels" in page
    assert "One sub-model of width 8 / m alone" in page
    assert "width 8, m = 2: " in done.stdout
