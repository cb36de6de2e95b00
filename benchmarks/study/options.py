"""Options of `study`; this module does without torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vigpipe.config.choices import Device

Launcher = Literal["auto", "local", "srun"]


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Options of `study`: the study's layouts, each timed by `vigpipe time` in turn.

    Attributes:
        images: training images of a run: its steps times the batch.
        batch: B, samples of one optimizer step over all replicas.
        data: cifar10, or a folder with train/<class>/<image> and test/<class>/<image>.
        data_dir: folder of the CIFAR-10 files.
        configs: layouts, a comma list: sequential (the whole mini-batch on one stage),
            accumulated-M (M micro-batches on one stage), SxM (S stages), DxSxM (D copies of them).
        threads: threads a rank, the same in all runs.
        rounds: times that all layouts run, one after another.
        seed: seed of weights and data order.
        warmup: steps, and test batches, at the beginning of a run that are not timed.
        test_batches: batches of the evaluation that ends a run, the warm-up among them.
        device: where to run; auto takes CUDA if there is a GPU.
        launcher: local starts the ranks on this host, srun inside an allocation of Slurm; auto
            takes srun inside one.
        profile: profile of the blocks from an earlier call; by default it is measured.
        out: folder of the results; by default results/<date>-study-<number>core.
        keep_runs: folder for the runs' own folders; a run that it already holds is not done again.
            By default none are kept.
    """

    images: int = 400
    batch: int = 40
    data: str = "cifar10"
    data_dir: Path = Path("data")
    configs: str = (
        "sequential,accumulated-5,accumulated-10,accumulated-20,2x5,2x10,4x5,4x10,2x2x5,2x2x10"
    )
    threads: int = 1
    rounds: int = 3
    seed: int = 0
    warmup: int = 2
    test_batches: int = 5
    device: Device = "auto"
    launcher: Launcher = "auto"
    profile: Path | None = None
    out: Path | None = None
    keep_runs: Path | None = None
