"""Options about replicas: what is filled in, and what does not go together."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import InputError
from vigpipe.run.events import recorded_replicas
from vigpipe.run.facts import prepare

PERIODIC = TrainConfig(strategy="periodic", dp=2)
GOSSIP = TrainConfig(strategy="gossip", dp=3)
SERVER = TrainConfig(strategy="server", dp=3)
SHARED = TrainConfig(model="gcn", shards=2)
HALO = TrainConfig(model="gcn", shards=2, split="halo", halo="stale")


def test_what_the_user_leaves_open_is_filled_in():
    resolved = with_replication_defaults(PERIODIC)
    found = resolved.average_every, resolved.average, resolved.items, resolved.final
    assert found == (20, "weights", "fixed", "mean")
    assert (resolved.outer_lr, resolved.outer_momentum, resolved.overlap) == (None, None, 0)
    outer = with_replication_defaults(replace(PERIODIC, average="outer", outer_momentum=0.9))
    assert (outer.outer_lr, outer.outer_momentum) == (1.0, 0.9)
    assert (resolved.pairs, resolved.answer) == (None, None)
    gossip = with_replication_defaults(GOSSIP)
    assert (gossip.average, gossip.pairs, gossip.answer) == ("weights", "any", "item")
    server = with_replication_defaults(SERVER)
    assert (server.staleness, server.items, server.average) == ("none", "fixed", None)


def test_compressed_sums_of_every_step_are_made_after_the_drain():
    compressed = TrainConfig(dp=2, compress="top-k:0.1")
    assert with_replication_defaults(compressed).sync == "drain"
    assert with_replication_defaults(replace(compressed, sync="drain")).sync == "drain"
    alone = replace(compressed, dp=1, sync="double")  # it sends nothing
    assert with_replication_defaults(alone) == alone
    for config in (PERIODIC, replace(GOSSIP, average="gradients")):
        assert with_replication_defaults(replace(config, compress="bfloat16")).sync is None


@pytest.mark.parametrize(
    "config",
    [
        *(TrainConfig(), PERIODIC, replace(PERIODIC, average="outer"), GOSSIP, SERVER),
        *(TrainConfig(dp=2, compress="top-k:0.1"), replace(GOSSIP, compress="bfloat16")),
    ],
)
def test_options_that_are_resolved_stay_as_they_are(config):
    """A run's config.toml starts the same run again."""
    resolved = with_replication_defaults(config)
    assert with_replication_defaults(resolved) == resolved


def test_a_graph_is_shared_by_rows_and_columns_unless_it_is_said_otherwise():
    assert with_replication_defaults(TrainConfig(model="gcn", shards=2)).split == "mixed"
    assert with_replication_defaults(HALO) == HALO


REFUSED = [
    (
        TrainConfig(average_every=5),
        "--average-every 5: is for .* gossip or subnetworks, where",
    ),
    (TrainConfig(replay=Path("runs/a")), "--replay runs/a: does again what replicas"),
    (TrainConfig(divided="tied"), "--divided tied: is for --strategy subnetworks"),
    (replace(PERIODIC, sync="drain"), "--sync drain: .* leave it out"),
    (
        replace(PERIODIC, elastic=True),
        "--elastic: is for .* choose synchronous",
    ),
    (
        replace(PERIODIC, average="gradients", outer_momentum=0.5),
        "--outer-momentum 0.5: is for --average outer, .*, and --average is gradients",
    ),
    (replace(PERIODIC, timing=True), "--timing: is for --strategy synchronous"),
    (
        TrainConfig(pairs="any"),
        "--pairs any: is .* is synchronous; .* choose gossip",
    ),
    (replace(PERIODIC, gossip_between="hosts"), "--gossip-between hosts: is for --strategy"),
    (replace(PERIODIC, answer="item"), "--answer item: is for --strategy gossip"),
    (replace(GOSSIP, average="outer"), "--average outer: needs the mean of all replicas"),
    (replace(GOSSIP, outer_lr=1.0), "--outer-lr 1.0: is for --average outer"),
    (replace(GOSSIP, pairs="sets"), "must be even, and --dp is 3; choose --pairs any"),
    (replace(GOSSIP, pairs="sets", dp=2, answer="interval"), "--answer interval: with --pairs"),
    (TrainConfig(overlap=2), "--overlap 2: is .* is synchronous; .* choose periodic"),
    (replace(GOSSIP, overlap=2), "--overlap 2: is for --strategy periodic, where all replicas"),
    (
        replace(PERIODIC, average="gradients", overlap=0),
        "--overlap 0: .* and --average is gradients; leave it out, or choose",
    ),
    (replace(PERIODIC, overlap=20), "--overlap 20: .* less than --average-every, which is 20"),
    (TrainConfig(staleness=2), "--staleness 2: is .* choose server"),
    (replace(GOSSIP, staleness="none"), "--staleness none: is for .* and --strategy is gossip"),
    (replace(SERVER, average_every=5), "--average-every 5: is .*, and --strategy is server"),
    (replace(SERVER, final="mean"), "--final mean: is .*, and --strategy is server"),
    (replace(SERVER, compress="bfloat16"), "--compress bfloat16: is for sums and averages"),
    (
        TrainConfig(compress="bfloat16", dtype="float16"),
        "--compress bfloat16: keeps what it leaves out .* choose --dtype bfloat16",
    ),
    (TrainConfig(dp=2, compress="bfloat16", sync="ddp"), "--sync ddp: .* or choose drain"),
    (replace(PERIODIC, compress="top-k:0.1"), "--compress top-k:0.1: .* choose --compress bfl"),
    (
        replace(GOSSIP, compress="powersgd:2", average="weights"),
        "--compress powersgd:2: sends the largest part of a difference, .* no common weights",
    ),
    (replace(SHARED, sync="ddp"), "--sync ddp: .* in which the ranks of --shards 2 exch"),
    (
        replace(SHARED, dp=2, strategy="subnetworks"),
        "--shards 2: lets ranks share the channels of a model, .* leave one of the two out",
    ),
    (
        replace(HALO, split=None),
        "--halo stale: is for .* --split is mixed; leave it",
    ),
    (replace(HALO, recompute="always"), "--halo stale with --recompute always: a repeated"),
    (replace(SHARED, chunks=3, split="halo"), "--chunks 3: is for .* and --split is halo; leave"),
    (TrainConfig(adjacency="split"), "--adjacency split: is .* and --shards is 1; leave"),
    (
        replace(SHARED, adjacency="split", chunks=2),
        "--adjacency split with --chunks 2: edges would tra",
    ),
]


def test_what_does_not_go_together_is_refused():
    check_refusals(REFUSED, with_replication_defaults)


def test_hosts_with_unequal_replicas_are_refused():
    hosts = replace(GOSSIP, gossip_between="hosts", batch_size=12)
    rows = [
        (replace(hosts, stages=2), 3, "a host has 3 of 6 ranks, with --stages 2; start a mult"),
        (hosts, 2, "expected the same number of whole replicas on every host"),
        (replace(hosts, dp=6, pairs="sets"), 2, "their number must be even, and there are 3"),
    ]
    check_refusals(rows, lambda run, num: prepare(run, torch.float32, ranks_on_host=num))


def test_a_server_needs_a_rank_for_each_stage():
    layout = prepare(replace(SERVER, stages=2, batch_size=12), torch.float32).layout
    assert (layout.world_size, layout.num_teams, layout.writer) == (8, 3, 3)
    assert str(layout).startswith("(3 workers + a server) × 2 stages")
    with pytest.raises(InputError, match=r"--stages 2 x \(--dp 3 \+ 1 .*\) needs 8; start 8 ranks"):
        layout.check_world(6)


def test_a_run_tells_when_compression_costs_more_than_it_saves():
    config = TrainConfig(dp=2, batch_size=12, compress="top-k:0.6")
    (note,) = prepare(config, torch.float32).notes
    assert note.startswith("--compress top-k:0.6: a replica sends 0.2 MB for each sum over 2")
    assert len(prepare(replace(config, compress="top-k:0.4"), torch.float32).notes) == 0
    (note,) = prepare(replace(config, dp=1), torch.float32).notes
    assert "nothing is compressed" in note


def test_one_host_says_that_nothing_is_averaged():
    run = prepare(replace(GOSSIP, gossip_between="hosts", batch_size=12), torch.float32)
    assert run.layout.num_teams == 1
    assert "--strategy gossip: there is one host, so nothing is averaged" in run.notes


FIRST_LINES = {
    '{"start": {"replicas": 3}}\n{"replica": 0': 3,
    '{"start": {"replicas": "3"}}': None,
    '{"replica": 0, "step": 1, "item": 0}': None,
    "[]": None,
    "torn": None,
}


@pytest.mark.parametrize("line", FIRST_LINES)
def test_what_several_hosts_did_is_done_again_on_one(line, tmp_path):
    assert recorded_replicas(tmp_path) is None
    (tmp_path / "events.jsonl").write_text(line)
    assert recorded_replicas(tmp_path) == FIRST_LINES[line]
    config = replace(GOSSIP, gossip_between="hosts", dp=6, batch_size=12)
    run = prepare(config, torch.float32, num_hosts=FIRST_LINES[line])
    assert run.layout.num_teams == (FIRST_LINES[line] or 1)
