"""One training step of a rank: when its state changes."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.oracle import images_of, shortened, with_images
from tests.small_model import small_model
from tests.world import run_each, run_ranks
from vigpipe import training
from vigpipe.checkpoint.state import named_tensors
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import ToHost
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import settle_after_loss, train_step

COLLECTIVES = ("all_reduce", "all_gather_into_tensor")
CLIPPED = TrainConfig(
    data="fake",
    image_size=8,
    batch_size=8,
    steps=2,
    stages=2,
    dp=2,
    microbatches=2,
    clip=0.1,
    ema=0.9,
)


@pytest.mark.parametrize(
    "sampled",
    [
        {"sampler": "parts", "parts": 4, "opt": "sgd"},
        {"sampler": "saint-node", "sample_nodes": 2, "coverage": 3, "opt": "adamw"},
        {"sampler": "parts", "parts": 4, "strategy": "periodic", "opt": "adamw"},
    ],
    ids=["parts", "saint", "periodic"],
)
def test_a_step_with_nothing_to_train_on_changes_nothing(sampled, tmp_path):
    draws = np.random.default_rng(0)
    half = [np.r_[draws.integers(0, 20, 40), draws.integers(20, 40, 40)] for _ in range(2)]
    split = np.full(40, -1)
    split[:12], split[12:20] = 0, 2  # the other half is trained on by nobody
    y = np.arange(40) % 2
    path = tmp_path / "g.npz"
    np.savez(path, edge_src=half[0], edge_dst=half[1], x=draws.random((40, 4)), y=y, split=split)
    options: dict[str, Any] = {"width": 4, "norm": "batch", "weight_decay": 5.0, "ema": 0.5}
    options |= {"warmup_epochs": 3, "clip": 1.0, "epochs": 4, **sampled}
    run = prepare(TrainConfig(model="sage", data=str(path), **options), torch.float32)
    rank_state = make_rank_state(run, 0, torch.device("cpu"))
    rates, skipped = [], []
    for item in range(run.num_steps):
        batch = rank_state.feed.batch(item)
        before = {name: tensor.clone() for name, tensor in named_tensors(rank_state).items()}
        step = train_step(rank_state, batch)
        rank_state.strategy.hear(step.agreement)
        now = named_tensors(rank_state)
        changed = {name for name in before if not torch.equal(now[name], before[name])}
        assert step.is_taken == batch.is_trained == bool(changed)
        rates.append(step.lr)
        skipped.append(not step.is_taken)
    assert rank_state.step == run.num_steps
    assert len(set(rates)) > 3  # the schedule has gone on
    assert set(skipped) == {True, False}


def changed_when_a_collective_begins(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What of a rank's state differs from that before the step.

    Returns:
        Names of tensors at any of the step's collectives, and after the step.
    """
    torch.set_num_threads(1)
    rank_state = make_rank_state(prepare(CLIPPED, torch.float32), rank, torch.device("cpu"))
    first, second = islice(batches(rank_state), 2)
    train_step(rank_state, first)  # the optimizer has a state only then
    before = {name: tensor.clone() for name, tensor in named_tensors(rank_state).items()}

    def changed() -> list[str]:
        now = named_tensors(rank_state)
        return [name for name in before if not torch.equal(now[name], before[name])]

    seen: dict[str, list[str]] = {name: [] for name in COLLECTIVES}

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **options: Any) -> Any:
            seen[name] += changed() or ["nothing"]
            return collective(*args, **options)

        return watch

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        train_step(rank_state, second)
    rank_state.feed.close()
    assert all(seen.values()), "a kind of collective is not watched any more"
    at_collectives = {name for names in seen.values() for name in names} - {"nothing"}
    return sorted(at_collectives), changed()


@pytest.mark.multiprocess
def test_no_state_changes_before_the_last_collective_of_a_step():
    """A rank that loses its peer in a collective saves its state as that of the step before.

    Running statistics of BatchNorm moved before --clip asked the other stages for their norms: what
    was rescued from there differed from the step's checkpoint in 69 tensors, and the statistics
    moved once more when the run went on.
    """
    for at_collectives, after in run_ranks(changed_when_a_collective_begins, 4):
        assert at_collectives == []
        kinds = {name.split("/")[0] for name in after}
        assert kinds == {"model", "ema", "optimizer"}
        assert any(name.endswith("running_mean") for name in after)


# ---- a rank that runs ahead of its device -----------------------------------------------------

NUM_STEPS, BAD_STEP = 5, 3
OPTIMIZERS = ("adamw", "sgd")
AHEAD = replace(
    CLIPPED,
    steps=NUM_STEPS,
    clip=None,
    drop_path=0.2,
    on_nan="skip",
    checkpoint_every=2,
    keep=9,
    opt="adamw",
    evaluate_every=99,
)


class Late(ToHost):
    """Numbers that come later than they are asked for the first times, as those of a GPU do."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.num_looks = 0

    def has_come(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 3


def train_in(rank: int, world_size: int, folder: Path, ahead: bool) -> list[list[int]]:
    """Train as a rank that runs ahead, or does not, with each optimizer, in a folder of its name.

    Returns:
        Of each, the step that was complete at every step.
    """
    torch.set_num_threads(1)
    complete: list[list[int]] = []

    def counted(rank_state, batch, wishes):
        if rank_state.step + 1 == BAD_STEP and batch.inputs is not None:
            batch.inputs.fill_(torch.nan)
        step = train_step(rank_state, batch, wishes)
        complete[-1].append(step.number - (rank_state.open_step is not None))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vigpipe.run.rank.runs_ahead", lambda device: ahead)
        patch.setattr("vigpipe.run.step.ToHost", Late if ahead else ToHost)
        patch.setattr(training, "train_step", counted)
        for opt in OPTIMIZERS:
            complete.append([])
            (folder / opt).mkdir(parents=True, exist_ok=True)
            run = prepare(replace(AHEAD, opt=opt), torch.float32)
            run = with_images(run, shortened(images_of(run), 24, 8))
            assert training.train(run, rank, torch.device("cpu"), folder / opt) == 0
    return complete


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = ("step_seconds", "images_per_second", "data_seconds", "time")
    return [{k: v for k, v in row.items() if k not in timeless} for row in rows]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {
        f"{path.relative_to(folder)}: {name}": tensor
        for path in files
        for name, tensor in load_file(path).items()
    }


@pytest.mark.multiprocess
def test_a_rank_that_runs_ahead_gets_the_same_run_bit_for_bit(tmp_path):
    """Losses, weights, running statistics, the moving average and every checkpoint's optimizer.

    One of the steps is not finite, and is skipped: by the device, which the host then learns late.
    """
    names, are_ahead = ("at-once", "ahead"), (False, True)
    with small_model():
        runs = run_each(train_in, 4, [tmp_path / name for name in names], are_ahead)
    for ahead, by_rank in zip(are_ahead, runs, strict=True):
        for of_rank in by_rank:
            for opt, complete in zip(OPTIMIZERS, of_rank, strict=True):
                late = ahead and opt == "adamw"  # SGD's fused form cannot skip a step by itself
                assert complete == [step - late for step in range(1, NUM_STEPS + 1)]
    for opt in OPTIMIZERS:
        folders = [tmp_path / name / opt for name in ("at-once", "ahead")]
        expected, rows = map(rows_of, folders)
        assert [row["step"] for row in rows if row.get("event") == "skipped"] == [BAD_STEP]
        assert sum("loss" in row and "top1" not in row for row in rows) == NUM_STEPS - 1
        assert rows == expected
        expected_tensors, tensors = map(tensors_of, folders)
        assert tensors.keys() == expected_tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected_tensors[name]), name


def open_step(outcome: type[ToHost]) -> RankState:
    """A rank that has handed its device a first step, and knows nothing of it yet."""
    alone = replace(AHEAD, stages=1, dp=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vigpipe.run.rank.runs_ahead", lambda device: True)
        patch.setattr("vigpipe.run.step.ToHost", outcome)
        rank_state = make_rank_state(prepare(alone, torch.float32), 0, torch.device("cpu"))
        train_step(rank_state, next(batches(rank_state)))
    rank_state.feed.close()
    assert rank_state.open_step is not None
    return rank_state


class CutShort(ToHost):
    """The outcome of a step whose last collective was aborted: not all ranks are counted."""

    def read(self) -> list[float]:
        return [math.nan, 0.0, 0.0, 1.0]


class Stuck(ToHost):
    """The outcome of a step that a GPU does not come to any more."""

    def has_come(self) -> bool:
        return False


@pytest.mark.parametrize(("outcome", "num_steps"), [(ToHost, 1), (CutShort, 0)])
def test_after_a_loss_the_state_is_that_of_the_last_whole_step(outcome, num_steps):
    rank_state = open_step(outcome)
    assert settle_after_loss(rank_state)
    assert (rank_state.step, rank_state.open_step) == (num_steps, None)
    moved = [norm.running_mean.any() for norm in rank_state.trained.statistics.norms]
    assert all(moved) == any(moved) == bool(num_steps)


def test_after_a_loss_a_gpu_that_is_stuck_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("vigpipe.run.step.SETTLE_SECONDS", 0.01)
    assert not settle_after_loss(open_step(Stuck))
