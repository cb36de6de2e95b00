"""Runs of ranks that share a graph: what they write, how they go on, and what is refused."""

import json
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.test_faults import ENV, FAULTY, line
from tests.refusals import check_refusals
from tests.world import run_command, run_ranks
from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.commands.comparable import check_comparable
from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.job.feed import Needs
from vigpipe.parallel.layout import Layout
from vigpipe.profiling.rehearse import CountedShards
from vigpipe.ranks import fit_to_world_size
from vigpipe.run.facts import prepare
from vigpipe.training import train

BASE = TrainConfig(
    model="sage",
    data="sbm:300,4,12,6",
    layers=3,
    width=10,
    dropout=0.3,
    norm="batch",
    opt="sgd",
    lr=0.05,
    epochs=4,
    ema=0.5,
    dtype="float64",
    checkpoint_every=2,
    seed=3,
)


def run_rank(rank, world_size, config, folder):
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    return train(prepare(config, torch.float64), rank, torch.device("cpu"), folder)


def run(config, folder):
    if config.shards == 1:
        run_rank(0, 1, config, folder)
    else:
        run_ranks(run_rank, config.shards * config.dp, config, folder)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "step_seconds" in row}
    scores = {row["epoch"]: row["macro_f1"] for row in rows if "macro_f1" in row}
    return losses, scores


def has_the_same(folder, other, *names):
    for name in names:
        ours, theirs = (load_file(run / f"{name}.safetensors") for run in (folder, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.multiprocess
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    losses, scores = run(BASE, whole)
    run(replace(BASE, shards=2, epochs=2), shared)
    newest = list_checkpoints(shared)[0]
    assert {path.name for path in newest.iterdir()} == {
        *("manifest.json", "stage0-replica0.safetensors", "stage0-replica1.safetensors"),
    }
    in_chunks = replace(BASE, shards=3, resume="auto", chunks=2)
    again = run(in_chunks, shared)
    assert again[0] == pytest.approx(losses, rel=1e-10)
    assert again[1] == pytest.approx(scores, rel=1e-10)
    has_the_same(shared, whole, "model", "model-ema")
    summary = json.loads((shared / "summary.json").read_text())
    assert summary["layout"]["ranks"] == 3
    assert summary["shards"]["number"] == 3
    assert summary["shards"]["split"] == "mixed"
    assert set(summary["shards"]["sent_bytes"]) == {"norms", "scores", "switches"}
    run(replace(BASE, resume="auto", epochs=5), shared)  # one process goes on, and has no chunks


@pytest.mark.multiprocess
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("strategy", "every", "num_ranks"), [("periodic", 2, 4), ("gossip", 2, 4), ("server", None, 6)]
)
def test_replicas_of_several_ranks_come_to_the_end_with_every_strategy(
    strategy, every, num_ranks, tmp_path
):
    options = {"strategy": strategy, "average_every": every, "epochs": 2}
    config = replace(BASE, sampler="parts", parts=6, shards=2, dp=2, ema=0.0, **options)
    assert run_ranks(run_rank, num_ranks, config, tmp_path / "run") == [0] * num_ranks
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test"]["nodes"] == 60
    assert summary["steps"] == 6


@pytest.mark.multiprocess
def test_a_rank_that_is_killed_costs_no_step_because_the_others_have_all_weights(tmp_path):
    options = [
        *("--model", "gcn", "--data", "sbm:300,4,12,6", "--layers", "3", "--width", "8"),
        *("--dropout", "0.3", "--norm", "batch", "--opt", "sgd", "--threads", "1"),
        *("--dtype", "float64", "--steps", "8", "--checkpoint-every", "2"),
    ]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    newest = folder / "checkpoints" / "step-00000002"
    env = {**ENV, "FAULT_DONE": str(tmp_path / "done"), "FAULT_AFTER": str(newest)}
    layout = ["--shards", "2", "--out", str(folder)]
    done = run_command(line(FAULTY, "exchange:4:1:kill", "2", "train", *options, *layout), env)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == ["vigpipe: rank 1 was ended by SIGKILL; out of memory?"]
    for place, more in ((folder, ["--resume", "auto"]), (whole, [])):
        command = [sys.executable, "-m", "vigpipe", "train", *options, "--out", str(place), *more]
        done = run_command(command, ENV)
        assert done.returncode == 0, done.stderr
        if place == folder:
            rows = (folder / "metrics.jsonl").read_text().splitlines()
            resumed = [row for row in map(json.loads, rows) if row.get("event") == "resumed"]
            assert [row["step"] for row in resumed] == [3]  # what rank 0 had saved
    has_the_same(folder, whole, "model")


def test_what_cannot_be_shared_is_refused():
    rows = [
        ({"stages": 2}, "--shards 2 with 2 stages: .* leave --shards out, or take --stages 1"),
        ({"sampler": "neighbour"}, "--shards 2: .* with --sampler neighbour every layer has nodes"),
        ({"split": "halo", "sampler": "parts"}, "--split halo: .* --sampler is parts; choose full"),
        ({"sampler": "parts", "adjacency": "split"}, "--adjacency split: .* with --sampler parts"),
        ({"model": "gat", "adjacency": "split"}, "--adjacency split: gat has learned weights of a"),
        ({"shards": 301}, "--shards 301: a sub-graph has 300 nodes at most; take fewer"),
        ({"shards": 0}, "--shards 0: must be a number from 1"),
        ({"model": "vig_study", "data": "fake"}, "--shards 2: .*vig_study"),
        ({"model": "vig_digits", "data": "digits", "split": "halo"}, "--split halo: is for a gr"),
    ]
    base = {"model": "gcn", "data": "sbm:300,4,12,6", "shards": 2}
    check_refusals(rows, lambda options: prepare(TrainConfig(**base | options), torch.float32))


def test_a_host_has_all_ranks_of_a_replica():
    hosts: dict[str, Any] = {"strategy": "gossip", "gossip_between": "hosts", "average_every": 1}
    config = replace(BASE, sampler="parts", parts=6, shards=2, dp=2, ema=0.0, **hosts)
    assert prepare(config, torch.float64, ranks_on_host=2).layout.num_teams == 2
    with pytest.raises(InputError, match="a host has 1 of 4 ranks, with --shards 2; start a mult"):
        prepare(config, torch.float64, ranks_on_host=1)


def test_elastic_keeps_the_shards_of_a_replica():
    config = TrainConfig(model="gcn", sampler="parts", shards=2, dp=3, elastic=True)
    layout = Layout(num_microbatches=2, num_replicas=3, num_shards=2)
    fitted = fit_to_world_size(config, layout, 4)
    assert (fitted.dp, fitted.shards, fitted.stages, fitted.microbatches) == (2, 2, 1, 3)
    with pytest.raises(InputError, match="5 ranks do not make whole replicas of --shards 2"):
        fit_to_world_size(config, layout, 5)


def test_a_halo_that_is_late_has_nothing_to_be_compared_with():
    config = TrainConfig(model="gcn", data="sbm:300,4,12,6", shards=2, split="halo", halo="stale")
    with pytest.raises(InputError, match=r"^--halo stale: does not train like one rank"):
        check_comparable(config, 3)


@pytest.mark.parametrize("split", ["mixed", "halo"])
@pytest.mark.parametrize("impl", ["fused", "plain"])
def test_the_edges_use_the_operators_that_the_user_chose(split, impl):
    config = replace(BASE, shards=2, split=split, impl=impl)
    job, layout = prepare(config, torch.float64).job, Layout(num_shards=2)
    needs = Needs(layout, 0, torch.device("cpu"), torch.float64, True, True, CountedShards(2, 0))
    feed = job.feed(needs)
    ((edges, *_),) = feed.batch(0).structures
    assert edges.fused == edges.with_loops().fused == (impl == "fused")
