"""The soak: its faults, its accounts, and a small one from end to end."""

import csv
import sys

import pytest

from benchmarks.soak import Sample, growth
from tests.world import run_command

pytestmark = pytest.mark.heavy


def test_growth_is_from_the_second_tenth_to_the_last():
    samples = [Sample(step, 0, 1000 + (500 if step < 10 else 0), 20) for step in range(0, 95, 5)]
    samples += [Sample(95, 0, 1020, 23), Sample(100, 0, 1020, 23)]
    assert growth(samples, 100) == [(0, pytest.approx(0.02, abs=1e-6), 3)]


@pytest.mark.multiprocess
def test_a_small_soak_from_end_to_end(tmp_path):
    command = "soak --steps 24 --faults-every 9 --checkpoint-every 5 --batch-size 16 --dp 2"
    out = tmp_path / "soak"
    given = [*command.split(), "--stages", "1", "--timeout", "2", "--out", str(out)]
    done = run_command([sys.executable, "-m", "benchmarks", *given])
    assert done.returncode == 0, done.stderr
    page = (out / "README.md").read_text()
    assert "left alone: 0\n" in page
    assert "Goodput: " in page
    with (out / "faults.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["freeze", "stop"]
    assert all(float(row["seconds"]) > 0 for row in rows)
