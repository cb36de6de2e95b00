"""Values of --halo, and what they go with."""

from dataclasses import replace

import pytest

from vigpipe.config.halo import HaloKind, parse_halo
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import InputError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, HaloKind()),
        ("exact", HaloKind()),
        ("stale", HaloKind("stale")),
        ("sampled:0.1", HaloKind("sampled", 0.1)),
        ("sampled:.5", HaloKind("sampled", 0.5)),
        ("sampled:1", HaloKind("sampled", 1.0)),
    ],
)
def test_a_method_and_its_rate(text, expected):
    assert parse_halo(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("fresh", "", "sampled", "sampled:", "sampled:0", "sampled:1.1", "sampled:-1", "STALE"),
        *("sampled:nan", "sampled:1e-1", "stale:1", "exact:1", "sampled:\u0660.\u0661"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(InputError, match="must be exact, stale, or sampled:P"):
        parse_halo(text)


def test_it_is_for_parts_and_a_late_halo_is_not_asked_for_twice():
    shared = TrainConfig(model="gcn", shards=2)
    assert with_replication_defaults(shared).split == "mixed"
    halo = replace(shared, split="halo", halo="stale")
    assert with_replication_defaults(halo) == halo
    with pytest.raises(InputError, match=r"--halo stale: says what .* --split is mixed; leave it"):
        with_replication_defaults(replace(shared, halo="stale"))
    with pytest.raises(InputError, match="--halo stale with --recompute always: a repeated"):
        with_replication_defaults(replace(halo, recompute="always"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 3, "split": "halo"}, "--chunks 3: is for .* mixed, and --split is halo; leave"),
        ({"adjacency": "split", "shards": 1}, "--adjacency split: is .* and --shards is 1; leave"),
        ({"adjacency": "split", "chunks": 2}, "--adjacency split with --chunks 2: edges would tra"),
    ],
)
def test_chunks_and_edges_that_travel_are_for_rows_and_columns(options, message):
    with pytest.raises(InputError, match=message):
        with_replication_defaults(replace(TrainConfig(shards=2), **options))
