"""A list of ways to sample a graph: what each word means."""

import pytest

from vigpipe.bench.options import SamplersBench
from vigpipe.bench.ways import parse_way, parse_ways
from vigpipe.config.choices import PARTITIONS, SAMPLERS
from vigpipe.errors import InputError


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("full", {"sampler": "full"}),
        ("full@120", {"sampler": "full", "epochs": "120"}),
        ("saint-walk", {"sampler": "saint-walk"}),
        ("neighbour@7", {"sampler": "neighbour", "epochs": "7"}),
        ("random", {"sampler": "parts", "partition": "random"}),
        (
            "metis:400+10@20",
            {
                "sampler": "parts",
                "partition": "metis",
                "parts": "400",
                "merge": "10",
                "epochs": "20",
            },
        ),
    ],
)
def test_a_way_says_how_the_graph_is_cut_and_how_long_it_is_trained_on(word, options):
    assert parse_way(word, word) == (word, options)


def test_the_default_is_every_way_for_graphs_of_any_size():
    default = SamplersBench().ways
    ways = [parse_way(word, default).options for word in default.split(",")]
    assert all("epochs" in way for way in ways)
    found = [way.get("partition", way["sampler"]) for way in ways]
    wanted = {*SAMPLERS, *PARTITIONS} - {"parts", "spectral"}
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    "word", ["", "louvain", "parts", "full:3", "fastgcn:2", "full+2", "metis:", "metis:4@", "x@3"]
)
def test_another_word_is_refused(word):
    with pytest.raises(
        InputError, match=r"--ways a,b: '.*' is not full, another sampler or a partition"
    ):
        parse_way(word, "--ways a,b")


def test_a_way_gets_the_sizes_of_its_own_sampler():
    options = SamplersBench(ways="full, saint-walk@3", roots=7, walk_length=2, batch_nodes=9)
    full, walk = parse_ways("ways", options)
    assert full.options == {"sampler": "full"}
    assert walk == (
        "saint-walk@3",
        {"sampler": "saint-walk", "epochs": "3", "roots": "7", "walk_length": "2"},
    )
