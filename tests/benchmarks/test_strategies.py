"""The benchmark of ways to agree: replicas that sleep, real tables and averages."""

import csv

import pytest

from benchmarks.options import StrategiesBench
from benchmarks.strategies import MACHINES, SERVED, WAYS, list_cases, run_cases
from benchmarks.strategies_page import share, write_page
from tests.world import run_ranks

pytestmark = pytest.mark.heavy

OPTIONS = StrategiesBench(dp=3, items=24, seconds=1e-3, numbers=1000, average_every="1", repeats=1)


def all_runs(rank, world_size, options):
    return run_cases(list_cases(options), options)


@pytest.fixture(scope="module")
def runs():
    return run_ranks(all_runs, 4, OPTIONS)[0]


@pytest.mark.multiprocess
def test_every_case_does_all_items_and_sends_what_the_formulas_say(runs):
    # Of top-k weights there is no average.
    assert len(runs) == len(MACHINES) * (len(WAYS) - 1 + len(SERVED))
    for run in runs:
        assert sum(run.items) == 24
        assert run.num_bytes == run.expected_bytes
        if run.case.way == "all, fixed":
            # 8 steps of each replica: 2 (D - 1) / D * 4 P bytes in 8 averages.
            assert run.num_bytes == 3 * 8 * 2 * 2 * 334 * 4
            assert list(run.items) == [8, 8, 8]
        if run.case.way in SERVED:
            assert run.num_bytes == 24 * (2 * 1000 * 4 + 24)
        assert run.seconds >= max(run.items) * 1e-3
        assert 0 < share(run, run.busy) <= 1


@pytest.mark.multiprocess
def test_the_page_has_a_row_for_every_case_and_names_what_was_measured(runs, tmp_path, capsys):
    write_page(tmp_path, OPTIONS, runs)
    page = (tmp_path / "README.md").read_text()
    assert "3 replicas do 24 items together and average 1,000 numbers (weights)" in page
    assert "The bytes sent are those of the formulas in every run" in page
    assert page.count("| pair, pool, interval ") == len(MACHINES)
    assert page.count("| server, fixed ") == len(MACHINES)
    assert "| Zhang 2021, Reddit, 8 GPUs" in page
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs)
    assert {row["machine"] for row in rows} == set(MACHINES)
    assert float(rows[0]["waiting_2"]) >= 0
