"""Measure how long the pieces of a model take, from the rows of several timed steps."""

import time
from collections.abc import Sequence
from statistics import median

from vigpipe.launch.device import synchronize
from vigpipe.profiling.trial import MAX_STEPS, NUM_WARMUP, Trial
from vigpipe.run.step import train_step
from vigpipe.spans import COMPUTE
from vigpipe.timing.recorder import Row

NUM_TURNS = 4  # turns of a trial; each has at least one step, unless steps take very long
# Both are of all turns together: no step of a turn begins after its part of the first, and no turn
# begins after the second.
ENOUGH_SECONDS, MAX_SECONDS = 3.0, 20.0


class TimedSteps:
    """Times steps of a trial, a few in each turn, so that all trials meet the same slow moments."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._num_steps, self._seconds = 0, 0.0

    def take_turn(self) -> None:
        """Run this turn's steps, the first time after NUM_WARMUP others."""
        if self._num_steps == 0:
            for _ in range(NUM_WARMUP):
                self.step()
        if self._seconds > MAX_SECONDS:
            return
        began = time.perf_counter()
        for _ in range(MAX_STEPS // NUM_TURNS):
            self.step()
            if time.perf_counter() - began > ENOUGH_SECONDS / NUM_TURNS:
                break
        self._seconds += time.perf_counter() - began

    def step(self) -> None:
        """Run a step; the recorder leaves out the first NUM_WARMUP."""
        rank_state, batch = self._trial
        with rank_state.timed("train", self._num_steps):
            train_step(rank_state, batch)
        synchronize(rank_state.device)
        self._num_steps += 1

    def rows(self) -> list[Row]:
        recorder = self._trial[0].recorder
        assert recorder is not None
        return recorder.take_rows()


def piece_seconds(rows: Sequence[Row], piece: str, direction: str) -> float:
    """Return the seconds that a piece takes for one micro-batch, the median over the steps."""
    regions = (piece, "loss") if piece == "readout" else (piece,)
    seconds: float = 0
    for region in regions:
        own = [row for row in rows if (row.name, row.direction) == (region, direction)]
        if own:
            seconds += median(row.seconds / row.count for row in own)
    return seconds


def dispatch_seconds(rows: Sequence[Row], pieces: Sequence[str]) -> float:
    """Return the seconds of one forward or backward that are spent in none of the pieces."""
    regions = {*pieces, "loss"}
    passes = [row for row in rows if row.name in COMPUTE]
    inside = [row for row in rows if row.name in regions and row.direction in COMPUTE]
    spent = sum(row.seconds for row in passes) - sum(row.seconds for row in inside)
    return max(0.0, spent / sum(row.count for row in passes))


def update_seconds(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the median seconds of what is done once a step, and of the part no cut shrinks."""
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row.step, {})[row.name] = row.seconds
    fixed = median(step.get("other", 0.0) for step in by_step.values())
    total = median(
        sum(step.get(name, 0.0) for name in ("other", "optimizer", "all-reduce"))
        for step in by_step.values()
    )
    return total, min(fixed, total)
