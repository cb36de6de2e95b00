"""Profile a model with as few steps as it takes to get every number."""

import pytest
import torch

from vigpipe.config.options import TrainConfig
from vigpipe.profiling import contention, measure, seconds, transfers
from vigpipe.profiling.measure import measure_profile
from vigpipe.run.facts import prepare

CPU = torch.device("cpu")
FEWEST = [
    (seconds, "ENOUGH_SECONDS", 0.0),
    (measure, "NUM_TURNS", 1),
    (contention, "NUM_STEPS", 1),
    (contention, "NUM_ROUNDS", 1),
    (transfers, "LARGE_BYTES", 1 << 16),
]


def make_run(**options):
    return prepare(TrainConfig(**options), torch.float32)


def quick_profile(run, rank, microbatch_sizes):
    """`measure_profile` with as few steps as it can do with."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in FEWEST:
            patch.setattr(module, name, value)
        return measure_profile(run, rank, CPU, microbatch_sizes)
