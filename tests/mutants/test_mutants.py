"""Planted faults are where they should be, and tests run in the order that finds them soonest."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import table
from tests.mutants.faults import draw, possible
from tests.mutants.lines import VARIABLE, Ran, note_lines, numbered
from tests.mutants.planting import Verdict, in_order

SOURCE = b'''"""A docstring that is 1 < 2."""
from __future__ import annotations
LIMIT = 1

def f(x: int = 3, name: str = "a") -> int:
    """Add 1."""
    import os
    total: int = x + 1
    if total >= LIMIT:
        raise ValueError(f"{total - 1} is over " + "1")
    for part in range(x):
        total += part
        print(name + "b", part)
    return total if x is None else -total
'''
EXPECTED = {
    ("sign", "x + 1", "(x - 1)"),
    ("constant", "1", "(2)"),
    ("branch", "total >= LIMIT", "False"),
    ("comparison", "total >= LIMIT", "(total <= LIMIT)"),
    ("left out", 'raise ValueError(f"{total - 1} is over " + "1")', "pass"),
    ("left out", "total += part", "pass"),
    ("sign", "total += part", "total -= part"),
    ("left out", 'print(name + "b", part)', "pass"),
    ("left out", "return total if x is None else -total", "pass"),
    ("branch", "x is None", "False"),
    ("comparison", "x is None", "(x is not None)"),
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "vigpipe" / "data").mkdir(parents=True)
    (tmp_path / "vigpipe" / "__init__.py").touch()
    (tmp_path / "vigpipe" / "data" / "f.py").write_bytes(SOURCE)
    return tmp_path


def test_faults_are_in_bodies_of_functions_and_in_no_text_annotation_or_message():
    found = [(f.kind, f.before, f.after) for f in possible("vigpipe/data/f.py", SOURCE)]
    assert len(found) == len(set(found))
    assert set(found) == EXPECTED


def test_a_seed_draws_the_same_faults_and_each_changes_its_piece_alone(checkout):
    faults = draw(checkout, 100, 1)
    assert faults != sorted(faults, key=str)
    assert faults == draw(checkout, 100, 1) != draw(checkout, 100, 2)
    for fault in faults:
        fault.plant(checkout)
        changed = (checkout / fault.file).read_bytes()
        compile(changed, fault.file, "exec")
        assert changed[: fault.begin] + changed[fault.begin + len(fault.after) :] == (
            SOURCE[: fault.begin] + SOURCE[fault.end :]
        )
        (checkout / fault.file).write_bytes(SOURCE)


def test_what_runs_is_known_of_a_process_that_is_killed(checkout, tmp_path):
    numbers = numbered(checkout)
    note_lines(checkout)
    hits = tmp_path / "hits"
    hits.write_bytes(bytes(len(numbers)))
    code = "import os; from vigpipe.data.f import f; print(f(-4)); os.kill(os.getpid(), 9)"
    done = subprocess.run(
        [sys.executable, "-uc", code], cwd=checkout, env={VARIABLE: str(hits)}, capture_output=True
    )
    assert (done.returncode, done.stdout) == (-9, b"3\n")
    ran = {line: hits.read_bytes()[number] for (_, line), number in numbers.items()}
    assert ran == {8: 1, 9: 1, 10: 0, 11: 1, 12: 0, 13: 0, 14: 1}


def test_the_cheapest_come_first_and_those_that_share_a_dear_fixture_stay_together():
    tests = [
        Ran("a.py::slow", 5.0, {}, True, b""),
        Ran("a.py::quick", 0.1, {"a.py:cheap": 0.5}, True, b""),
        Ran("b.py::first", 0.1, {"b.py:runs": 6.0}, True, b""),
        Ran("b.py::second", 0.3, {"b.py:runs": 6.0}, True, b""),
        Ran("c.py::third", 1.0, {}, True, b""),
    ]
    names = [ran.test.partition("::")[2] for ran in in_order(tests)]
    assert names == ["quick", "third", "first", "second", "slow"]


def test_the_table_counts_by_room_and_names_what_was_missed():
    verdicts = [
        Verdict("vigpipe/run/a.py:1: branch: x → False", "run", True, "t", 1.0),
        Verdict("vigpipe/data/b.py:2: sign: a + b → a - b", "data", False, "all 3 tests passed", 2),
    ]
    assert table(verdicts).splitlines() == [
        "| room | faults | found |",
        "|---|---|---|",
        "| run | 1 | 1 |",
        "| data | 1 | 0 |",
        "| all | 2 | 1 |",
        "",
        "1 were not found:",
        "",
        "- vigpipe/data/b.py:2: sign: a + b → a - b (all 3 tests passed)",
    ]
