"""Replicas that die while the others go on: real ranks, killed or frozen; and a replay of it."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.test_faults import ENV, FAULTY, line, rows
from tests.small_digits import NUM_TEST, SMALL_DIGITS
from tests.world import run_command
from vigpipe.errors import SAVED

pytestmark = pytest.mark.multiprocess

NUM_STEPS = 12
OPTIONS = [
    *(*SMALL_DIGITS, "--batch-size", "12", "--microbatches", "2", "--steps", str(NUM_STEPS)),
    *("--dropout", "0.1", "--drop-path", "0.2", "--ema", "0.5", "--lr", "1e-2"),
    *("--warmup-epochs", "0", "--checkpoint-every", "4", "--threads", "1"),
]
GOSSIP = ["--strategy", "gossip", "--items", "pool", "--average-every", "2"]
GRADIENTS = [*GOSSIP, "--average", "gradients", "--norm", "layer"]
SERVER = ["--strategy", "server", "--items", "pool"]


def run_with(
    fault: str, ranks: str, options: list[str], folder: Path, *more: str, data: list[str] = OPTIONS
) -> subprocess.CompletedProcess[str]:
    """Train with a fault, as faulty.py names it, on ranks as it names them."""
    size = int(ranks.partition("x")[2].partition("+")[0])
    layout = ["--dp", ranks.partition("x")[0], "--stages", str(size)]
    command = ["train", *data, *options, *layout, "--out", str(folder), *more]
    env = {**ENV, "FAULT_DONE": str(folder.with_name(f"{folder.name}-done"))}
    return run_command(line(FAULTY, fault, ranks, *command), env)


def events(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]


def is_done_without(lost: set[int], ranks: str, folder: Path, unit: str = "images") -> None:
    """Every item was done, and the files say who was lost."""
    num_items = NUM_STEPS * int(ranks.partition("x")[0])
    items = Counter(e["item"] for e in events(folder) if "item" in e and "did" not in e)
    assert items.keys() == set(range(num_items))
    assert {e["replica"] for e in events(folder) if "lost" in e} == lost
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["replicas"]["lost"]) == lost
    assert summary["test"][unit] == {"images": NUM_TEST, "nodes": 80}[unit]
    told = [row["message"] for row in rows(folder) if row.get("event") == "lost"]
    assert len(told) >= len(lost - {0})  # of replica 0, others know before one of them writes


def is_done_again(folder: Path, ranks: str, options: list[str], data: list[str] = OPTIONS) -> None:
    """Whoever does what was recorded ends in the same weights, here on one stage each."""
    num_replicas = ranks.partition("x")[0]
    again = folder.with_name(f"{folder.name}-again")
    given = [*data, *options, "--dp", num_replicas, "--replay", str(folder), "--out", str(again)]
    done = run_command([sys.executable, "-m", "vigpipe", "train", *given], ENV)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "model-ema.safetensors"):
        if (folder / name).exists():
            assert (again / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("fault", "ranks", "options"),
    [
        pytest.param("average:3:1:kill", "3x1", GRADIENTS, marks=pytest.mark.heavy),
        ("backward:3:3:kill", "2x2+2", SERVER),
        ("end:1:0:kill", "3x1", GOSSIP),  # the one that writes
    ],
)
def test_a_replica_that_is_killed_costs_no_item_and_the_run_can_be_repeated(
    fault, ranks, options, folder
):
    done = run_with(fault, ranks, options, folder)
    assert done.returncode == 0, done.stderr
    size, rank = int(ranks[2]), int(fault.split(":")[2])
    lost = rank // size
    (told,) = done.stderr.splitlines()
    num, left = int(ranks[0]), int(ranks[0]) - 1
    assert told == (
        f"vigpipe: replica {lost} is lost, and the run goes on with {left} of {num} replicas: "
        f"rank {rank} was ended by SIGKILL; out of memory?"
    )
    is_done_without({lost}, ranks, folder)
    is_done_again(folder, ranks, options)


@pytest.mark.parametrize(
    ("fault", "ranks", "options"),
    [
        pytest.param("average:3:0:freeze", "2x1", GOSSIP, marks=pytest.mark.heavy),
        ("step:3:1:freeze", "2x1+1", SERVER),
    ],
)
def test_a_replica_that_is_frozen_is_given_up_and_ended(fault, ranks, options, folder):
    done = run_with(fault, ranks, options, folder, "--timeout", "3")
    assert done.returncode == 0, done.stderr
    assert "answered no more, and was killed" in done.stderr
    is_done_without({int(fault.split(":")[2])}, ranks, folder)


def test_replicas_stop_for_one_that_was_asked_to_and_is_gone(folder):
    """Nobody else knew why, and the run ended with an exception."""
    done = run_with("stop:2:1:kill", "3x1", GOSSIP, folder)
    assert done.returncode == SAVED, done.stderr
    assert "(a replica that is lost was asked to stop) with a checkpoint in" in done.stdout
    given = [*OPTIONS, *GOSSIP, "--dp", "3", "--resume", "auto", "--out", str(folder)]
    again = run_command([sys.executable, "-m", "vigpipe", "train", *given], ENV)
    assert again.returncode == 0, again.stderr
    items = Counter(e["item"] for e in events(folder) if "item" in e and "did" not in e)
    assert items.keys() == set(range(3 * NUM_STEPS))


def test_a_server_that_is_killed_ends_the_run_which_goes_on_from_its_checkpoint(folder):
    done = run_with("checkpoint:6:2:kill", "2x1+1", SERVER, folder)
    assert done.returncode == 137
    given = [*OPTIONS, *SERVER, "--dp", "2", "--resume", "auto", "--out", str(folder)]
    again = run_command([sys.executable, "-m", "vigpipe", "train", *given], ENV)
    assert again.returncode == 0, again.stderr
    assert "lost" not in json.loads((folder / "summary.json").read_text())["replicas"]


def random_fault(
    seed: int, num_replicas: dict[int, int], most_steps: int, kinds: list[str]
) -> tuple[int, str]:
    """Choose the number of stages of a run, and its fault.

    Args:
        seed: of the choice.
        num_replicas: D, by the number of stages.
        most_steps: of its replica, before which the fault happens.
        kinds: what may happen, each as often as it is named.
    """
    rng = random.Random(seed)
    size = rng.choice([1, 1, 2])
    place = rng.choice(["step", "average", "end"] + ["forward", "backward"] * (size > 1))
    rank = rng.randrange(num_replicas[size] * size)
    return size, f"{place}:{rng.randint(1, most_steps)}:{rank}:{rng.choice(kinds)}"


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(int(os.environ.get("VIGPIPE_RANDOM_FAULTS", "2"))))
def test_faults_at_random(seed, folder):
    """A rank is killed or frozen, or all of a replica, wherever they are; of 40 runs, each strategy
    has 20.
    """
    name, options = list({"gossip": GOSSIP, "server": SERVER}.items())[seed % 2]
    num_replicas = {1: 3, 2: 2}
    size, fault = random_fault(seed, num_replicas, 8, ["kill", "node", "freeze"])
    ranks = f"{num_replicas[size]}x{size}" + (f"+{size}" if name == "server" else "")
    done = run_with(fault, ranks, options, folder, "--timeout", "5")
    print(f"FIGURE {name} {ranks} {fault}: {done.returncode} {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    if folder.with_name("run-done").exists():  # with a pool, the replica may not take so many steps
        is_done_without({int(fault.split(":")[2]) // size}, ranks, folder)
    is_done_again(folder, ranks, options)
