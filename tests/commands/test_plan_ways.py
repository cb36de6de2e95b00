"""`vigpipe plan --ranks`: what is printed, what is written, what is refused."""

import json
import os
import shlex
import sys
from dataclasses import replace

import pytest
import torch

from tests.commands.refusals import check_commands
from tests.planning.measured import make_measured
from tests.profiling.test_ways import AS_FEW
from tests.world import run_command
from vigpipe.cli import main
from vigpipe.config.options import TrainConfig
from vigpipe.planning.ways import read_measured, write_measured
from vigpipe.profiling.ways import on_one_rank, ways_options
from vigpipe.run.facts import prepare

GRAPH = ("--model", "gcn", "--data", "sbm:400,4,12,6", "--layers", "3", "--width", "16")


@pytest.fixture
def known(here):
    """Made-up costs of the ways, as if they were those of GRAPH."""
    config = TrainConfig(model="gcn", data="sbm:400,4,12,6", layers=3, width=16)
    options = ways_options(on_one_rank(prepare(config, torch.float32), config))
    path = here / "known.json"
    write_measured(replace(make_measured(), model="gcn", options=options), path)
    return str(path)


def plan(*arguments: str) -> int:
    return main(["plan", *GRAPH, "--ranks", "2", *arguments])


def test_all_ways_are_told_and_one_is_taken(known, capsys):
    assert plan("--profile", known, "--sampler", "full", "--lr", "0.5", "--threads", "1") == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    lines = [line.split("  ") for line in stdout.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    # The fastest epoch first; bytes of a step and of an epoch are those of all ranks.
    assert [line[:3] for line in cells[2:5]] == [
        ["replicas of parts", "--sampler parts --dp 2", "no"],
        ["take", "mixed", "--shards 2 --split mixed"],
        ["halo", "--shards 2 --split halo", "yes"],
    ]
    assert cells[2][3:] == ["4.56", "20", "4.0", "80.0", "40"]
    assert "Take mixed: 6.64 s an epoch" in stdout
    assert stdout.rstrip().endswith(
        "take it with vigpipe train --model gcn --data sbm:400,4,12,6 --layers 3 --width "
        "16 --sampler full --lr 0.5 --shards 2 --split mixed --threads 1"
    )


def test_a_network_and_a_memory_limit_change_what_is_taken(known, capsys):
    for options, way in (
        (("--bandwidth", "16Mb/s"), "halo"),
        (("--latency", "1s", "--bandwidth", "1Mb/s"), "one rank"),
        (("--memory-limit", "65MB"), "mixed"),
    ):
        assert plan("--profile", known, *options) == 0
        assert f"Take {way}: " in capsys.readouterr().out


WRONG = [
    ("2 --stages 3", "--stages 3: with --ranks 2 all ways to use the ranks are compared"),
    ("2 --halo stale", "--halo stale: with --ranks 2 all ways"),
    ("2 --explain", "the choice is always explained; leave one of them out"),
    ("2 --microbatches 3", "a step takes 3 sub-graphs, but --sampler full has 1"),
    ("2 --out x.toml", "--out x.toml: must end in .json"),
    ("2 --strategy gossip", "--strategy gossip: is for vigpipe train, check and time"),
    ("2 --norm batch", "norm = none, but this run has norm = batch"),
    (
        "2 --memory-limit 1kB",
        "every way needs more; the leanest, mixed, needs 60.0 MB",
    ),
    ("2 --lr 0.5 --opt sgd", "opt"),  # the optimizer's time is part of a step
    ("1", "--ranks 1: must be at least 2"),
    ("4", "was measured with --ranks 2, but this run has --ranks 4"),
    ("x", "--ranks x: must be a whole number"),
]


def test_wrong_use_is_one_sentence(known, capsys):
    graph = " ".join(GRAPH)
    check_commands(capsys, f"plan {graph} --profile known.json --ranks", WRONG)
    others = [
        (f"{graph} --ranks 2 --profile none.json", "none.json: cannot be read"),
        (f"{graph} --shards 2", "with --ranks 2"),
        ("--model vig_digits --data digits --ranks 2", "vig_digits is a model of images"),
    ]
    check_commands(capsys, "plan", others)


def test_what_was_measured_is_written_and_predicts_again(here, capsys, monkeypatch):
    for module, name, value in AS_FEW:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("vigpipe.commands.start_plan.ranks_to_measure", lambda *_: 1)
    monkeypatch.setattr("vigpipe.profiling.ways.has_own_cores", lambda _: True)
    assert plan("--out", "x.json", "--threads", "1") == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    assert "messages between ranks count as free" in stdout
    found = {way.name: way for way in read_measured(here / "x.json").ways}
    # Ranks on GPUs of their own compute at once as fast as one.
    alone, at_once = found["mixed"].seconds
    assert alone == at_once
    assert plan("--profile", "x.json", "--out", "y.json") == 0
    assert not (here / "y.json").exists()
    table = stdout.splitlines()[:8]
    assert capsys.readouterr().out.splitlines()[:8] == table
    assert plan("--out", "x.json", "--threads", "1") == 0  # its own file
    (here / "z.json").write_text("{}")
    assert plan("--out", "z.json") == 2


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_two_ranks_measure_and_their_command_trains(here):
    command = ["-m", "vigpipe", "plan", *GRAPH, "--ranks", "2", "--threads", "1", "--out", "x.json"]
    done = run_command([sys.executable, *command], {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.splitlines()[-1].split("take it with vigpipe ")[1])
    assert json.loads((here / "x.json").read_text())["links"]["num_ranks"] == 2
    again = [sys.executable, "-m", "vigpipe", *words, "--steps", "1", "--out", "run"]
    trained = run_command(again, {"OMP_NUM_THREADS": "1"})
    assert trained.returncode == 0, trained.stderr
    assert os.path.exists("run/summary.json")
