"""Measure how long the pieces of a model take, from the rows of several timed steps."""

import time
from collections.abc import Sequence
from statistics import median

import torch

from vigpipe.launch.device import synchronize
from vigpipe.profiling.trial import MAX_STEPS, NUM_WARMUP, Trial
from vigpipe.run.step import train_step
from vigpipe.spans import COMPUTE
from vigpipe.timing.recorder import Row

MIN_STEPS = 4  # timed steps, unless they take more than MAX_SECONDS
ENOUGH_SECONDS = 3.0  # no further step begins after this time
MAX_SECONDS = 20.0  # after this time a single timed step must do


def time_steps(trial: Trial, device: torch.device) -> list[Row]:
    """Run training steps of a trial and return the recorder's rows of the timed ones."""
    rank_state, batch = trial
    assert rank_state.recorder is not None
    began = time.perf_counter()
    for number in range(NUM_WARMUP + MAX_STEPS):
        with rank_state.timed("train", number):
            train_step(rank_state, batch)
        synchronize(device)
        passed = time.perf_counter() - began
        if number == NUM_WARMUP - 1:
            began = time.perf_counter()
        elif number >= NUM_WARMUP:
            has_enough = number >= NUM_WARMUP + MIN_STEPS
            if passed > (ENOUGH_SECONDS if has_enough else MAX_SECONDS):
                break
    return rank_state.recorder.take_rows()


def piece_seconds(rows: Sequence[Row], piece: str, direction: str) -> float:
    """Return the seconds that a piece takes for one micro-batch, the median over the steps.

    Args:
        rows: rows of `time_steps`.
        piece: `stem`, `block 3` or `readout`; the loss counts as part of the readout.
        direction: `forward` or `backward`.
    """
    regions = (piece, "loss") if piece == "readout" else (piece,)
    return sum(
        median(values)
        for region in regions
        if (
            values := [
                row.seconds / row.count
                for row in rows
                if (row.name, row.direction) == (region, direction)
            ]
        )
    )


def dispatch_seconds(rows: Sequence[Row], pieces: Sequence[str]) -> float:
    """Return the seconds of one forward or backward that are spent in none of the pieces."""
    regions = {*pieces, "loss"}
    passes = [row for row in rows if row.name in COMPUTE]
    inside = [row for row in rows if row.name in regions and row.direction in COMPUTE]
    spent = sum(row.seconds for row in passes) - sum(row.seconds for row in inside)
    return max(0.0, spent / sum(row.count for row in passes))


def update_seconds(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the seconds of the work that is done once a step, medians over the steps.

    Returns:
        The seconds of all of it (optimizer, adding gradients up, other), and of the part that
        does not shrink when the model is cut into stages.
    """
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row.step, {})[row.name] = row.seconds
    fixed = median(step.get("other", 0.0) for step in by_step.values())
    total = median(
        sum(step.get(name, 0.0) for name in ("other", "optimizer", "all-reduce"))
        for step in by_step.values()
    )
    return total, min(fixed, total)
