"""The table of faults in the README, row by row: what is told, the exit code, and how soon.

Every run is a real one with real ranks. After the fault the same command line goes on with --resume
auto, and its weights are those of a run that nothing has happened to.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.world import run_command, start_command, wait_until
from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.cli import main

pytestmark = pytest.mark.multiprocess

FAULTY = str(Path(__file__).with_name("faulty.py"))
TRAIN = ["-m", "vigpipe", "train"]
OPTIONS = ["--steps", "6", "--batch-size", "24", "--threads", "1", "--checkpoint-every", "2"]
STAGES = ["--stages", "2", "--microbatches", "2"]
REPLICAS = ["--dp", "2"]
ENV = {"CUDA_VISIBLE_DEVICES": ""}


def line(*arguments):
    return [sys.executable, *arguments]


def faulty(fault, layout, folder, *more):
    given = ["train", *OPTIONS, *layout, "--out", str(folder), *more]
    return line(FAULTY, fault, "2", *given)


def rows(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return {
        row["step"]: row["loss"] for row in rows(folder) if "event" not in row and "step" in row
    }


def run_here(folder, *more):
    """In this process, on the micro-batches that STAGES and REPLICAS make."""
    torch.set_num_threads(1)
    given = [*OPTIONS, "--microbatches", "2", "--out", str(folder), *more]
    assert main(["train", *given]) == 0
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run that nothing happens to."""
    return run_here(tmp_path_factory.mktemp("unbroken") / "run")


def goes_on_as_if_nothing_had_been(folder, unbroken):
    """One process goes on with what two ranks have left: a layout is no part of a checkpoint."""
    run_here(folder, "--resume", "auto")
    is_the_same(folder, unbroken)


def is_the_same(folder, unbroken):
    assert losses(folder) == losses(unbroken)
    weights = [(run / "model.safetensors").read_bytes() for run in (folder, unbroken)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("place", "layout"),
    [
        ("forward", STAGES),
        ("backward", STAGES),
        ("all-reduce", REPLICAS),
        ("checkpoint", STAGES),
    ],
)
def test_a_rank_killed_in(place, layout, unbroken, tmp_path):
    folder = tmp_path / "run"
    step = 4 if place == "checkpoint" else 5
    newest = (
        folder / "checkpoints" / ("step-00000002" if place == "checkpoint" else "step-00000004")
    )
    env = {**ENV, "FAULT_DONE": str(tmp_path / "done"), "FAULT_AFTER": str(newest)}
    done = run_command(faulty(f"{place}:{step}:1:kill", layout, folder), env)
    noticed = time.time() - float((tmp_path / "done").read_text().split()[1])
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines() == ["rank 1 was ended by SIGKILL; out of memory?"]
    assert noticed < 5  # to the end of the last process; the peer itself notices much earlier
    peer = json.loads((folder / "failed-rank0.json").read_text())
    assert (peer["kind"], peer["code"]) == ("lost peer", 70)
    seconds = peer["time"] - float((tmp_path / "done").read_text().split()[1])
    print(
        f"FIGURE killed in {place}: a peer noticed after {seconds:.2f} s, all ended {noticed:.2f}"
    )
    if place != "checkpoint":
        assert seconds < 1
    assert list_checkpoints(folder)[0] == newest  # at most one interval is lost
    goes_on_as_if_nothing_had_been(folder, unbroken)


def test_a_frozen_rank_is_noticed_at_the_timeout(unbroken, tmp_path):
    folder = tmp_path / "run"
    env = {**ENV, "FAULT_DONE": str(tmp_path / "done")}
    began = time.monotonic()
    with start_command(
        faulty("backward:5:1:freeze", STAGES, folder, "--timeout", "3"), env
    ) as command:
        wait_until((tmp_path / "done").exists, 60, "the rank freezes")
        at = (tmp_path / "done").read_text().split()[1]
        wait_until((folder / "failed-rank0.json").exists, 30, "its peer notices")
        peer = json.loads((folder / "failed-rank0.json").read_text())
        seconds = peer["time"] - float(at)
        done = command.wait(30)
    print(f"FIGURE frozen: noticed after {seconds:.2f} s with --timeout 3")
    assert 2.5 < seconds < 6
    assert done.returncode == 70
    assert "rank 1 answered no more" in done.stderr
    assert time.monotonic() - began < 90
    goes_on_as_if_nothing_had_been(folder, unbroken)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "rank 1: RuntimeError: the fault of the test"),
        ("memory", "rank 1 ran out of memory"),
    ],
)
def test_an_exception_on_one_rank(what, message, unbroken, tmp_path):
    folder = tmp_path / "run"
    env = {**ENV, "FAULT_DONE": str(tmp_path / "done")}
    done = run_command(faulty(f"backward:3:1:{what}", STAGES, folder), env)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "lost a peer" not in done.stderr
    record = json.loads((folder / "failed-rank1.json").read_text())
    assert (record["kind"], record["rank"]) == ("own", 1)
    goes_on_as_if_nothing_had_been(folder, unbroken)


def test_restarts_need_no_hand(unbroken, tmp_path):
    folder = tmp_path / "run"
    command = line(*TRAIN, *OPTIONS, *STAGES, "--out", str(folder), "--max-restarts", "2")
    with start_command(command, ENV) as running:
        for step in (3, 5):
            wait_until(lambda s=step: at_step(folder, s), 60, f"step {step}")
            victim = rank_0(folder)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda v=victim: not Path(f"/proc/{v}").exists(), 20, "it is gone")
        done = running.wait(90)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 2, from step-0000000" in done.stderr
    is_the_same(folder, unbroken)


def at_step(folder, step):
    path = folder / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def rank_0(folder):
    return int((folder / ".lock").read_text().split()[1])
