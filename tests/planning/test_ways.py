"""Measured costs of ways to use ranks, as a file that anybody may have written."""

from dataclasses import replace

import pytest

from tests.planning.measured import NONE, make_measured
from tests.planning.profiles import check_changes
from vigpipe.planning.ways import WAYS_MARK, read_measured, write_measured


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ways.json"
    measured = make_measured()
    write_measured(replace(measured, ways=(*measured.ways, replace(NONE, num_ranks=2))), path)
    return path


def test_what_is_written_is_read(file):
    measured = make_measured()
    found = read_measured(file)
    assert found.ways[:-1] == measured.ways
    assert replace(found, ways=()) == replace(measured, ways=())
    assert WAYS_MARK in file.read_text()


# What is changed, to which value, and words of the message.
IMPOSSIBLE = [
    (["colour"], "red", "'colour' is amiss"),
    (["num_ranks"], 0, "num_ranks is 0"),
    (["num_ranks"], 3, "num_ranks of a way is 2"),
    (["ways"], [], "the first way is not that of a single rank"),
    (["ways", 0, "num_ranks"], 2, "the first way is not that of a single rank"),
    (["ways", 0, "seconds"], [], "way 'one rank' has no seconds"),
    (["ways", 0, "seconds"], [0.0], "seconds holds 0.0"),
    (["ways", 1, "seconds"], [float("nan")], "seconds holds nan"),
    (["ways", 1, "name"], "a\nb", "name of a way is"),
    (["ways", 1, "is_same"], 1, "is_same is 1"),
    (["ways", 1, "exchanges"], [[2, 1], [1, 1]], "exchanges are not ascending"),
    (["ways", 1, "exchanges"], [[1, -1]], "exchanges holds -1"),
    (["ways", 1, "peak_bytes"], 1.5, "peak_bytes is 1.5"),
    (["ways", 4, "layers", "stages"], [[0, 1], [3, 2]], "stages are"),
    (["ways", 4, "layers", "others"], [1.0], "others are"),
    (["ways", 4, "layers", "profile", "blocks"], [], "it has no blocks"),
    (["links", "bandwidth"], 0, "links are amiss"),
    (["links", "sums"], [], "links are amiss"),
    (["links"], 3, "a table was expected, not int"),
    (["options"], [], "model, options or facts are amiss"),
]


def test_impossible_numbers_are_refused(file):
    check_changes(IMPOSSIBLE, read_measured, file, "does not hold the costs of ways to use ranks")
