"""New rows of a run are told once, also when it goes on from a checkpoint."""

import json
import os

import pytest

from vigpipe.run.follow import RowFollower, last_step, parse_rows


def line(step, try_=0):
    return json.dumps({"step": step, "try": try_}) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def replace(path, *lines):
    """As a run does that goes on: in one step, by another file."""
    other = path.with_suffix(".new")
    other.write_text("".join(lines))
    os.replace(other, path)


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def steps(rows):
    return [(row["step"], row["try"]) for row in rows]


def test_rows_come_as_they_are_written_and_a_torn_line_waits(path):
    follower = RowFollower(path)
    assert follower.read_new() == []  # no file yet
    append(path, line(1) + line(2)[:5])
    assert steps(follower.read_new()) == [(1, 0)]
    append(path, line(2)[5:] + line(3))
    assert steps(follower.read_new()) == [(2, 0), (3, 0)]
    assert follower.read_new() == []


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(path):
    os.mkfifo(path)
    assert RowFollower(path).read_new() == []
    assert last_step(path.parent) == 0


def test_rows_of_an_earlier_run_are_not_new(path):
    append(path, line(1) + line(2) + line(3))
    follower = RowFollower(path)
    assert follower.read_new() == []
    replace(path, line(1), line(2))  # the checkpoint was of step 2
    assert follower.read_new() == []
    append(path, line(3, try_=1))
    assert steps(follower.read_new()) == [(3, 1)]


def test_a_run_that_starts_again_tells_only_what_it_does_anew(path):
    follower = RowFollower(path)
    append(path, line(1) + line(2) + line(3))
    assert len(follower.read_new()) == 3
    replace(path, line(1), line(2, try_=1), line(3, try_=1))  # no look between the two
    assert steps(follower.read_new()) == [(2, 1), (3, 1)]
    append(path, line(4, try_=1))
    assert steps(follower.read_new()) == [(4, 1)]


def test_a_row_that_nests_too_deep_is_no_row(path):
    append(path, line(1) + 100_000 * "[" + "\n")
    assert last_step(path.parent) == 0  # as the whole line is not among what is looked at
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_rows(path.read_bytes())


def test_the_last_step_is_told_also_while_its_line_is_written(path):
    assert last_step(path.parent) == 0  # no file yet
    append(path, "".join(line(step) for step in range(1, 200)))
    append(path, json.dumps({"event": "data", "step": 199}) + "\n" + line(200)[:9])
    assert last_step(path.parent) == 199
