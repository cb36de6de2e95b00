"""A run on a graph goes on from its checkpoints, in any layout, and says what it did."""

import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed
from safetensors.torch import load_file

from tests.refusals import check_refusals
from tests.world import run_ranks
from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.config.options import TrainConfig
from vigpipe.parallel.split import StageModule
from vigpipe.run.facts import prepare
from vigpipe.training import train

CPU = torch.device("cpu")
PARTS = TrainConfig(
    model="gcn2",
    data="sbm:400,4,12,6",
    layers=4,
    width=8,
    dropout=0.3,
    norm="batch",
    sampler="parts",
    partition="random",
    parts=10,
    microbatches=4,
    epochs=2,
    dtype="float64",
    checkpoint_every=1,
    keep=99,
    keep_best="macro_f1",
    seed=3,
)


def run(config, folder, rank=0):
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    return train(prepare(config, torch.float64), rank, CPU, folder)


def run_rank(rank, world_size, config, folder):
    return run(config, folder, rank)


def are_equal(*folders) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def interrupted_after(step, whole, folder):
    """Copy a run, as if it had been ended after a step."""
    shutil.copytree(whole, folder)
    for checkpoint in list_checkpoints(folder):
        if int(checkpoint.name[-8:]) > step:
            shutil.rmtree(checkpoint)
    for name in ("model.safetensors", "summary.json"):
        (folder / name).unlink()
    return folder


def run_slow_rank(rank, world_size, config, folder):
    """Run a rank; the last one takes its time in the first evaluation."""
    by_layer, pauses = StageModule.by_layer, [2 * config.timeout * (rank == world_size - 1)]

    def slow(*args):
        time.sleep(pauses.pop() if pauses else 0)
        return by_layer(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageModule, "by_layer", slow)
        return run(config, folder, rank)


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "event" not in row]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(PARTS, folder) == 0
    return folder


def test_rows_and_summary_speak_of_nodes(whole):
    steps = [row for row in rows(whole) if "step" in row]
    evaluations = [row for row in rows(whole) if "accuracy" in row]
    assert [row["epoch"] for row in steps] == [1, 1, 1, 2, 2, 2]
    assert sum(row["training_nodes"] for row in steps) == 2 * 240
    nodes = [row["nodes_per_second"] * row["step_seconds"] for row in steps]
    assert sum(nodes) == pytest.approx(2 * 400)
    for epoch, row in enumerate(evaluations, 1):
        assert (row["nodes"], row["validation"]["nodes"]) == (80, 80)
        assert {"loss", "accuracy", "micro_f1", "macro_f1"} < row.keys()
        own = [s for s in steps if s["epoch"] == epoch]
        mean = sum(s["loss"] * s["training_nodes"] for s in own) / 240
        assert row["training_loss"] == pytest.approx(mean)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["graph"]["nodes"] == 400
    assert summary["graph"]["partition"]["parts"] == 10
    best = max(row["validation"]["macro_f1"] for row in evaluations)
    assert summary["best"]["value"] == best
    assert (summary["best"]["by"], summary["best"]["unit"]) == ("macro_f1", "nodes")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout", [{"stages": 2}, {"stages": 2, "dp": 2, "microbatches": 2}], ids=str
)
def test_another_layout_goes_on_from_a_checkpoint(whole, layout, tmp_path):
    config = replace(PARTS, **layout, resume="auto")
    there = interrupted_after(2, whole, tmp_path / "run")
    assert isinstance(config.stages, int)
    num_ranks = config.stages * config.dp
    assert run_ranks(run_rank, num_ranks, config, there) == [0] * num_ranks
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (there, whole))
    differences = [(ours[name].double() - theirs[name].double()).abs().max() for name in theirs]
    assert max(differences) <= (0 if config.dp == 1 else 1e-10)
    scores = [[row["loss"] for row in rows(folder)] for folder in (there, whole)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-10)


@pytest.mark.multiprocess
def test_ranks_wait_for_a_stage_that_evaluates_longer_than_they_would_wait_in_a_step(tmp_path):
    config = replace(PARTS, stages=2, timeout=2.0, checkpoint_every="never", keep_best=None)
    assert run_ranks(run_slow_rank, 2, config, tmp_path / "run") == [0, 0]


def test_another_graph_or_other_parts_are_refused(whole, tmp_path):
    rows = [
        ({"data": "sbm:401,4,12,6"}, "nodes was 400, is 401"),
        ({"partition": "metis"}, "partition"),
    ]
    config = replace(PARTS, resume=str(whole))
    check_refusals(rows, lambda options: run(replace(config, **options), tmp_path / "new"))


def test_a_graph_of_a_single_class_is_refused_unless_nodes_may_have_none(tmp_path):
    """The accuracy of every model was 100 %."""
    ends, labels = np.arange(6), np.zeros(6, np.int64)
    arrays = {"edge_src": ends, "edge_dst": ends[::-1], "x": np.eye(6), "split": ends % 3}
    np.savez(tmp_path / "one.npz", **arrays, y=labels)
    np.savez(tmp_path / "several.npz", **arrays, y=(ends % 2)[:, None])
    config = TrainConfig(model="sage", width=8, data=str(tmp_path / "one.npz"))
    refused([({}, "one.npz: all its nodes with a class are of one, '0',")], config)
    prepare(replace(config, data=str(tmp_path / "several.npz")), torch.float32)


def refused(rows, config):
    """Check that each row, of options, is refused before a run starts."""
    check_refusals(rows, lambda options: prepare(replace(config, **options), torch.float64))


def test_wrong_use_is_one_sentence():
    rows = [
        ({"batch_size": 8}, "--batch-size 8: is for images, and gcn2 is a model of a graph"),
        ({"model": "vig_digits"}, "--layers 4: is for a graph, and vig_digits is a model of im"),
        ({"dp": 3}, "a step takes 12 sub-graphs, but --sampler parts with --parts 10 .* has 10"),
        (
            {"merge": 11},
            "--parts is 10; join 10 at most, or choose --parts 11 or",
        ),
        ({"keep_best": "top1"}, "--keep-best top1: gcn2 is a model of a graph, so choose acc"),
        ({"norm": "group"}, "--norm group: gcn2 is a model of a graph, so choose none or"),
        ({"aggregator": "max"}, "--aggregator max: gcn2 has no choice"),
    ]
    refused(rows, PARTS)


def test_wrong_use_of_other_samplers_is_one_sentence():
    full = "takes 4 sub-graphs, but --sampler full has 1 an epoch; take both as 1"
    few = "takes 4 sub-graphs, but --sampler saint-walk has [12] an epoch; choose smaller sub-gr"
    rows = [
        ("full", {"coverage": 5}, "--coverage 5: is for --sampler saint-node, saint-edge or sa"),
        ("full", {}, full),
        ("fastgcn", {"items": "own", "dp": 2}, "--items own: is for a graph that is cut into par"),
        ("neighbour", {"fanout": "3,0"}, "--fanout 3,0: must be numbers of neighbours, 1 or more"),
        ("neighbour", {"fanout": "3,2"}, "--fanout 3,2: has numbers for 2 layers, and the model h"),
        ("saint-node", {"sample_nodes": 0}, "--sample-nodes 0: must be a number from 1"),
        ("saint-walk", {"roots": 300}, few),
    ]
    rows = [({"sampler": sampler, **options}, message) for sampler, options, message in rows]
    refused(rows, replace(PARTS, partition=None, parts=None))
