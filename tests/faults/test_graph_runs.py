"""Ranks that train on one graph and are killed: what is done again, or goes on, is the same run."""

import signal
import sys

import pytest

from tests.faults.test_deaths import GOSSIP, NUM_STEPS, is_done_again, is_done_without, run_with
from tests.faults.test_faults import ENV, FAULTY, is_the_same, line
from tests.world import run_command
from vigpipe.checkpoint.manifest import list_checkpoints

pytestmark = pytest.mark.multiprocess

GRAPH = [
    *("--model", "gcn2", "--data", "sbm:400,4,12,6", "--layers", "4", "--width", "8"),
    *("--dropout", "0.3", "--norm", "batch", "--threads", "1", "--sampler", "parts"),
    *("--partition", "random", "--parts", "12", "--repartition-every", "1"),
]


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(tmp_path):
    options = [*GRAPH, "--steps", "8", "--checkpoint-every", "2", "--microbatches", "4"]
    folder, whole = tmp_path / "run", tmp_path / "whole"
    newest = folder / "checkpoints" / "step-00000004"
    env = {**ENV, "FAULT_DONE": str(tmp_path / "done"), "FAULT_AFTER": str(newest)}
    layout = ["--stages", "2", "--out", str(folder)]
    done = run_command(line(FAULTY, "backward:5:1:kill", "2", "train", *options, *layout), env)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == ["vigpipe: rank 1 was ended by SIGKILL; out of memory?"]
    assert list_checkpoints(folder)[0] == newest
    for place, more in ((folder, ["--resume", "auto"]), (whole, [])):
        command = [sys.executable, "-m", "vigpipe", "train", *options, "--out", str(place), *more]
        done = run_command(command, ENV)
        assert done.returncode == 0, done.stderr
    is_the_same(folder, whole)


@pytest.mark.heavy
def test_a_replica_that_is_killed_costs_no_sub_graph(folder):
    data = [*GRAPH, "--steps", str(NUM_STEPS), "--microbatches", "2", "--checkpoint-every", "4"]
    done = run_with("forward:3:2:kill", "2x2", GOSSIP, folder, data=data)
    assert done.returncode == 0, done.stderr
    is_done_without({1}, "2x2", folder, "nodes")
    is_done_again(folder, "2x2", GOSSIP, data)
