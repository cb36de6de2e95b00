"""Options of the benchmarks; without torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from vigpipe.choices import Model
from vigpipe.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PipelineBench(TrainConfig):
    """The options of train, with other defaults.

    Attributes:
        repeats: timed steps of every contender.
    """

    model: Model = "vig_ti_224"
    data: str = "fake"
    stages: int | Path = 2
    microbatches: int = 5
    batch_size: int | None = 20
    threads: int | None = 1
    repeats: int = 9


@dataclass(frozen=True, kw_only=True)
class SyncBench(PipelineBench):
    """The same with two replicas."""

    dp: int = 2
