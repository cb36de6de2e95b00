"""Measure what timing itself costs a rank."""

import time
from statistics import median

import torch

from vigpipe.timing.clock import Clock
from vigpipe.timing.recorder import Recorder

NUM_REPEATS = 15
NUM_REGIONS = 40


def stamp_seconds(clock: Clock, device: torch.device) -> float:
    """Measure the seconds that a stamp costs its rank.

    The same tiny regions run with and without timing, in turn. This covers forward and backward,
    the alias and the hooks that a region needs, and the rows that are made at the end of a step.
    The result is the median of NUM_REPEATS differences over NUM_REGIONS regions each.
    """
    x = torch.zeros(1, device=device, requires_grad=True)
    differences: list[float] = []
    for _ in range(NUM_REPEATS):
        seconds: dict[bool, float] = {}
        num_stamps = 0
        for is_timed in (False, True):
            recorder = Recorder(clock, rank=0, replica=0, num_warmup=0, num_steps=int(is_timed))
            clock.finish()
            start = time.perf_counter()
            with recorder.step("train", 1):
                recorder.enter("forward", 0, 0)
                y = x
                for _ in range(NUM_REGIONS):
                    y = recorder.region("region", torch.neg, (y,))
                recorder.enter("backward", 0, 0)
                y.backward()
            clock.finish()
            seconds[is_timed] = time.perf_counter() - start
            num_stamps = recorder.num_stamps
        differences.append((seconds[True] - seconds[False]) / num_stamps)
    return max(median(differences), 0.0)
