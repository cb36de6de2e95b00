"""The soak: its faults, its accounts, and a small one from end to end."""

import csv
import json
import sys

import pytest

from tests.world import run_command
from vigpipe.bench.options import SoakBench
from vigpipe.bench.soak import Happened, Sample, _account, choose_faults, growth, last_step

pytestmark = pytest.mark.heavy


def test_faults_come_about_as_often_as_asked_and_are_those_of_the_seed():
    options = SoakBench(steps=2000, faults_every=100)
    faults = choose_faults(options)
    assert faults == choose_faults(options) != choose_faults(SoakBench(seed=1))
    assert 15 <= len(faults) <= 25
    assert {fault.kind for fault in faults} == {"kill", "freeze", "stop"}
    assert all(0 < fault.step < 2000 for fault in faults)
    assert all((fault.rank == -1) == (fault.kind == "stop") for fault in faults)
    assert {fault.rank for fault in faults} == {-1, 0, 1, 2, 3}
    assert choose_faults(SoakBench(faults_every=0)) == []


def test_the_last_step_is_read_past_torn_lines_and_events(tmp_path):
    assert last_step(tmp_path) == 0
    rows = [{"step": step, "loss": 0.5} for step in range(1, 200)]
    lines = [json.dumps(row) for row in [*rows, {"event": "resumed", "step": 7}, {"epoch": 1}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 20')
    assert last_step(tmp_path) == 199


def test_a_fault_costs_until_the_run_is_past_its_step():
    happened = [Happened(50, "kill", 1, began=0.0)]
    for step in (50, 42, 47, 50):
        _account(happened, step)
        assert happened[0].seconds == 0
    _account(happened, 51)
    assert (happened[0].lost_steps, happened[0].seconds > 0) == (8, True)


def test_growth_is_from_the_second_tenth_to_the_last():
    samples = [Sample(step, 0, 1000 + (500 if step < 10 else 0), 20) for step in range(0, 95, 5)]
    samples += [Sample(95, 0, 1020, 23), Sample(100, 0, 1020, 23)]
    assert growth(samples, 100) == [(0, pytest.approx(0.02, abs=1e-6), 3)]


@pytest.mark.multiprocess
def test_a_small_soak_from_end_to_end(tmp_path):
    command = "bench soak --steps 24 --faults-every 9 --checkpoint-every 5 --batch-size 16 --dp 2"
    out = tmp_path / "soak"
    given = [*command.split(), "--stages", "1", "--timeout", "2", "--out", str(out)]
    done = run_command([sys.executable, "-m", "vigpipe", *given])
    assert done.returncode == 0, done.stderr
    page = (out / "README.md").read_text()
    assert "left alone: 0\n" in page
    assert "Goodput: " in page
    with (out / "faults.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["freeze", "stop"]
    assert all(float(row["seconds"]) > 0 for row in rows)
