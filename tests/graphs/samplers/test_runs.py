"""Whole runs on sub-graphs that are drawn: done again with other stages, and gone on with."""

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.graphs.test_training import (
    PARTS,
    are_equal,
    interrupted_after,
    rows,
    run,
)
from tests.world import run_command
from vigpipe.errors import InputError
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.sbm import draw
from vigpipe.run.facts import prepare

DRAWN = replace(PARTS, model="sage", partition=None, parts=None, microbatches=1, keep_best=None)
WALKS = replace(DRAWN, sampler="saint-walk", roots=40, walk_length=2, coverage=5)
NEIGHBOURS = replace(DRAWN, sampler="neighbour", batch_nodes=60, fanout="3")


@pytest.mark.parametrize("config", [WALKS, NEIGHBOURS], ids=["walks", "neighbours"])
def test_a_plan_goes_by_the_sub_graphs_of_the_first_epoch_and_their_sizes(config):
    job = prepare(config, torch.float64).job
    assert isinstance(job, GraphJob)
    drawn = [job.sampler.draw(1, number) for number in range(*job.sampler.num_sub_graphs)]
    sizes = [(len(sub_graph.nodes), sub_graph.adjacency.num_edges) for sub_graph in drawn]
    for trial in job.trials([], 4):
        assert tuple(trial.size.values()) == sizes[trial.item]
    nodes, edges = (sum(of_all) / len(sizes) for of_all in zip(*sizes, strict=True))
    assert job.typical_microbatch.rows == pytest.approx(nodes)
    assert job.typical_microbatch.others == (pytest.approx(edges),)
    options = job.cost_options()
    own = {"roots", "walk_length", "coverage"} if config is WALKS else {"batch_nodes", "fanout"}
    assert options.keys() - prepare(PARTS, torch.float64).job.cost_options().keys() == own


@pytest.mark.multiprocess
def test_ranks_read_what_the_command_that_starts_them_has_made(tmp_path):
    graph, path = draw("sbm:200,4,12,6", seed=1), tmp_path / "graph.npz"
    arrays: dict[str, Any] = {"edge_src": graph.indices, "edge_dst": graph.targets()}
    arrays |= {"x": graph.features, "y": graph.labels, "split": graph.split}
    np.savez(path, **arrays)
    words = ["train", "--model", "sage", "--width", "8", "--dp", "2", "--threads", "1"]
    words += ["--steps", "1", "--sampler", "saint-walk", "--roots", "40", "--walk-length", "2"]
    words += ["--data", str(path), "--out", str(tmp_path / "run")]
    done = run_command([sys.executable, "-m", "vigpipe", *words])
    assert done.returncode == 0, done.stderr
    assert "s, and read from a file" in done.stdout + done.stderr
    of_graph = json.loads((tmp_path / "run" / "summary.json").read_text())["graph"]
    assert 0 < of_graph["counted"]["read_seconds"] < of_graph["sampler_seconds"]
    assert len(list((tmp_path / "graph.npz.parts").iterdir())) == 1


@pytest.mark.parametrize(
    ("config", "other"), [(WALKS, {"roots": 41}), (NEIGHBOURS, {"fanout": "4"})]
)
def test_a_run_goes_on_with_the_sub_graphs_that_it_would_have_drawn(config, other, tmp_path):
    whole = tmp_path / "whole"
    assert run(config, whole) == 0
    there = interrupted_after(2, whole, tmp_path / "there")
    assert run(replace(config, resume="auto"), there) == 0
    assert are_equal(there, whole)
    with pytest.raises(InputError, match=next(iter(other))):
        run(replace(config, **other, resume=str(whole)), tmp_path / "other")


def test_rows_count_the_nodes_that_are_drawn_and_those_that_they_stand_for(tmp_path):
    assert run(replace(WALKS, checkpoint_every="never"), tmp_path / "run") == 0
    steps = [row for row in rows(tmp_path / "run") if "step" in row]
    assert {row["training_nodes"] for row in steps} == {240}
    nodes = [row["nodes_per_second"] * row["step_seconds"] for row in steps]
    assert all(40 < num < 120 for num in nodes)
    counted = json.loads((tmp_path / "run" / "summary.json").read_text())["graph"]["counted"]
    assert counted["sub_graphs"] * counted["mean_nodes"] > 5 * 400
    evaluation = next(row for row in rows(tmp_path / "run") if "accuracy" in row)
    assert evaluation["nodes"] == 80  # all test nodes, on the whole graph
