"""The benchmark of ways to agree: replicas that sleep, real tables and averages."""

import csv
from itertools import islice

import pytest

from tests.world import run_ranks
from vigpipe.bench.options import StrategiesBench
from vigpipe.bench.strategies import (
    MACHINES,
    OVERLAPPED,
    SERVED,
    WAYS,
    item_seconds,
    list_cases,
    run_cases,
)
from vigpipe.bench.strategies_page import share, write_page
from vigpipe.errors import InputError

OPTIONS = StrategiesBench(
    dp=3, items=24, seconds=1e-3, numbers=1000, average_every="1,4", repeats=1
)


def all_runs(rank, world_size, options):
    return run_cases(list_cases(options), options)


@pytest.fixture(scope="module")
def runs():
    return run_ranks(all_runs, 4, OPTIONS)[0]


@pytest.mark.multiprocess
def test_every_case_does_all_items_and_sends_what_the_formulas_say(runs):
    # Of top-k weights there is no average.
    assert len(runs) == len(MACHINES) * ((len(WAYS) - 1) * 2 + len(SERVED))
    for run in runs:
        assert sum(run.items) == 24
        assert run.num_bytes == run.expected_bytes
        if run.case.way == "all, fixed":
            # 8 steps of each replica: 2 (D - 1) / D * 4 P bytes in 8 or 2 averages.
            assert run.num_bytes == 3 * (8 // run.case.average_every) * 2 * 2 * 334 * 4
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
    assert page.count("| pair, pool, interval ") == len(MACHINES) * 2
    assert page.count("| server, fixed ") == len(MACHINES)
    assert "| Zhang 2021, Reddit, 8 GPUs" in page
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(runs)
    assert {row["machine"] for row in rows} == set(MACHINES)
    assert float(rows[0]["waiting_2"]) >= 0


def test_a_slow_replica_takes_four_times_as_long_and_a_spell_ten_items():
    def first(machine, replica, num=4):
        return list(islice(item_seconds(machine, replica, 4, 2.0, seed=1), num))

    assert first("equal", 3) == [2.0] * 4
    assert first("one slow", 2) == [2.0] * 4
    assert first("one slow", 3) == [8.0] * 4
    spells = first("spells", 0, 4000)
    assert set(spells) == {2.0, 8.0}
    lengths = [len(run) for run in "".join("s" if s > 2 else " " for s in spells).split()]
    assert min(lengths[:-1]) == 10
    assert 0.1 < sum(s > 2 for s in spells) / 4000 < 0.3
    assert spells != first("spells", 1, 4000)


def test_gradients_are_averaged_compressed_too_and_without_an_overlap():
    ways = {case.way for case in list_cases(StrategiesBench(average="gradients"))}
    assert ways == {*WAYS, *SERVED} - {OVERLAPPED}
    assert "all, fixed, top-k:0.01" in ways


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dp": 1}, "--dp 1: must be from 2 to 64"),
        ({"items": 401}, "--items 401: must be a multiple of --dp 4, such as 400"),
        ({"items": 0}, "--items 0: must be a multiple of --dp 4, such as 4"),
        ({"average_every": "1,x"}, "--average-every 1,x: must be whole numbers above 0"),
        ({"average_every": "0"}, "--average-every 0: must be whole numbers"),
        ({"repeats": 0}, "--repeats 0: must be from 1"),
        ({"seconds": float("nan")}, "--seconds nan: must be from 0.001 to 60"),
    ],
)
def test_what_cannot_be_run_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        list_cases(StrategiesBench(**changed))
