"""Parts that are balanced by measured time: a run can be done again, and resumed, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch

from tests.graphs.test_training import (
    PARTS,
    are_equal,
    interrupted_after,
    refused,
    run,
    run_rank,
)
from tests.world import run_ranks
from vigpipe.checkpoint.manifest import list_checkpoints, read_manifest
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.partitions.generations import Rates
from vigpipe.graphs.repartition import Repartition
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.parallel.layout import Layout
from vigpipe.run.facts import prepare

MEASURED = replace(PARTS, partition="metis", epochs=3, repartition_every=1, keep_best=None)
KEY = "seconds per node and per edge, of each generation of parts"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "run"
    with pytest.MonkeyPatch.context() as patch:  # parts of METIS take about the same time
        rates = iter((Rates(1e-6, 1e-5), Rates(2e-5, 1e-6), Rates(0.0, 1e-6)))
        patch.setattr("vigpipe.graphs.repartition.fit_rates", lambda *_: next(rates))
        assert run(MEASURED, folder) == 0
    return folder


def test_measured_parts_are_told_and_kept(whole):
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    told = [row for row in map(json.loads, lines) if row.get("event") == "data"]
    assert [row["step"] for row in told] == [3, 6]  # nothing comes after the last epoch
    assert "parts from epoch 2 on: since a node takes" in told[0]["message"]
    rates = [read_manifest(c).data[KEY] for c in list_checkpoints(whole)]  # newest first
    assert [len(of_step) for of_step in rates[::-1]] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert rates[0] == [[1e-6, 1e-5], [2e-5, 1e-6], [0.0, 1e-6]]


@pytest.mark.multiprocess
def test_a_run_is_done_again_with_other_stages(whole, tmp_path):
    config = replace(MEASURED, stages=2, replay=whole)
    assert run_ranks(run_rank, 2, config, tmp_path / "run") == [0, 0]
    assert are_equal(tmp_path / "run", whole)
    fixed = replace(MEASURED, repartition_every=None)
    assert run(fixed, tmp_path / "fixed") == 0
    assert not are_equal(tmp_path / "fixed", whole)


def test_a_run_goes_on_with_the_parts_that_it_had(whole, tmp_path):
    there = interrupted_after(7, whole, tmp_path / "run")  # in the last epoch
    assert run(replace(MEASURED, resume="auto"), there) == 0
    assert are_equal(there, whole)


def hear_all(layout: Layout, seconds_of) -> Parts:
    """Take two epochs' steps, of which each rank is said to have taken so long."""
    run = prepare(replace(MEASURED, data="sbm:400,4,12,30", repartition_every=2), torch.float64)
    assert isinstance(run.job, GraphJob)
    sampler = run.job.sampler
    assert isinstance(sampler, Parts)
    layout = replace(layout, num_teams=1)
    repartition = Repartition(sampler, layout, num_steps=999)
    steps = 10 // (layout.num_replicas * layout.num_microbatches)
    for step in range(2 * steps):
        busy = [seconds_of(sampler, step - 1, rank) for rank in range(layout.world_size)]
        told = repartition.hear(step, step - 1, busy)
        assert (told is None) == (step < 2 * steps - 1)
    return sampler


def test_what_was_measured_is_found_again():
    def seconds_of(sampler, step, rank):
        if step < 0:
            return 0.0
        epoch, number = step // 10 + 1, step % 10
        nodes, edges = sampler.num_nodes(epoch, number), sampler.num_edges(epoch, number)
        slow = 99 * (step == 0)  # the first step warms up
        return slow + 2e-6 * nodes + 3e-8 * edges

    sampler = hear_all(Layout(), seconds_of)
    assert sampler.generations.rates == [pytest.approx((2e-6, 3e-8))]


def test_measurements_are_read_with_care():
    run = prepare(MEASURED, torch.float64)
    sampler = run.job.sampler  # pyrefly: ignore[missing-attribute]
    wrong = [[1.0]], [[1.0, float("nan")]], [[1.0, -1.0]]
    rows = [({KEY: rates}, "not seconds per node") for rates in wrong]
    for data, why in (({}, "it has no 'seconds per node"), *rows):
        with pytest.raises(ValueError, match=why):
            Repartition(sampler, Layout(), 9).restore(data)


def test_wrong_use_is_one_sentence():
    own = {"strategy": "periodic", "items": "own", "dp": 2, "microbatches": 1}
    rows = [
        ({"strategy": "gossip"}, "--repartition-every 1: balances metis parts by what all replica"),
        (own, "--repartition-every 1: moves nodes from part to part"),
        ({"repartition_every": 0}, "--repartition-every 0: must be a number from 1"),
        ({"sampler": "full", "partition": None, "parts": None}, "--repartition-every 1: is for"),
        ({"partition": "random", "replay": "x"}, "--replay x: does again what replicas with"),
    ]
    refused(rows, MEASURED)
