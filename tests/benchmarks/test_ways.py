"""A list of ways to sample a graph: what each word means."""

import pytest

from benchmarks.ways import parse_way
from tests.refusals import check_refusals

pytestmark = pytest.mark.heavy


def test_a_way_says_how_the_graph_is_cut_and_how_long_it_is_trained_on():
    parts = {"sampler": "parts", "partition": "metis", "parts": "400", "merge": "10"}
    for word, options in {
        "full": {"sampler": "full"},
        "full@120": {"sampler": "full", "epochs": "120"},
        "saint-walk": {"sampler": "saint-walk"},
        "random": {"sampler": "parts", "partition": "random"},
        "metis:400+10@20": parts | {"epochs": "20"},
    }.items():
        assert parse_way(word, word) == (word, options)


def test_another_word_is_refused():
    words = "", "louvain", "full:3", "full+2", "metis:", "x@3"
    known = "'.*' is not full, another sampler or a partition"
    check_refusals([(word, known) for word in words], parse, "--ways a,b: ")


def parse(word):
    return parse_way(word, "--ways a,b")
