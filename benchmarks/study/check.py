"""Check the options, the images and the machine before the first run of the study."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.study.options import StudyConfig
from vigpipe.config.options import TrainConfig, flag
from vigpipe.errors import InputError
from vigpipe.launch.environment import expand_tasks, from_environment
from vigpipe.parallel.layout import Layout

MODEL = "vig_study"


@dataclass(frozen=True)
class Machine:
    """The machine that the runs use."""

    has_slurm: bool  # whether every run is started with srun, as a step of the allocation
    num_cores: int  # number of cores that the runs may use


def find_machine(config: StudyConfig) -> Machine:
    """Find out whether to use srun, and how many cores there are.

    Raises:
        InputError: this process is itself a rank, or srun is asked for outside an allocation.
    """
    if from_environment(os.environ).launcher != "alone":
        raise InputError(
            "study: starts its ranks itself: call it once, without srun or torchrun in "
            "front; in an allocation of Slurm it calls srun for every run"
        )
    # Inside a step, srun would wait for the processors that this step itself holds.
    in_batch = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    if config.launcher == "srun" and not in_batch:
        raise InputError(
            "--launcher srun: this is not a batch script of Slurm; submit "
            "benchmarks/study.sbatch, or choose --launcher local"
        )
    if config.launcher == "local" or not in_batch:
        return Machine(False, _local_cores())
    processors = os.environ.get("SLURM_JOB_CPUS_PER_NODE")
    return Machine(True, sum(expand_tasks(processors)) if processors else _local_cores())


def _local_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_numbers(config: StudyConfig, layouts: Mapping[str, Layout]) -> None:
    """Raise InputError for numbers that are out of range or do not fit together."""
    least = {"images": 1, "batch": 1, "rounds": 1, "warmup": 0, "test_batches": 1, "threads": 1}
    for name, smallest in least.items():
        if getattr(config, name) < smallest:
            raise InputError(f"{flag(name)} {getattr(config, name)}: must be at least {smallest}")
    images, batch, warmup = config.images, config.batch, config.warmup
    if images % batch:
        raise InputError(
            f"--images {images}: must be a whole number of batches of {batch}; choose "
            f"{images - images % batch or batch}"
        )
    if images // batch <= warmup:
        raise InputError(
            f"--images {images}: makes {images // batch} steps of --batch {batch}, and the first "
            f"{warmup} (--warmup) are not timed; choose at least {(warmup + 1) * batch}"
        )
    if config.test_batches <= warmup:
        raise InputError(
            f"--test-batches {config.test_batches}: the first {warmup} (--warmup) are not timed; "
            f"choose at least {warmup + 1}"
        )
    for name, layout in layouts.items():
        total_microbatches = layout.num_microbatches * layout.num_replicas
        if total_microbatches > batch:
            raise InputError(
                f"--configs {name}: cuts a batch into {total_microbatches} micro-batches, but "
                f"--batch has {batch} samples; choose a larger batch or other layouts"
            )


def check_with_torch(config: StudyConfig, layouts: Mapping[str, Layout]) -> tuple[str, int]:
    """Check before the first run everything that a later run would fail with and that needs torch.

    Returns:
        A description of the images, and the number of blocks of the model.

    Raises:
        InputError: a layout does not fit the model, images are missing or too few, or the
            profile is of another model or other options.
    """
    import torch

    from vigpipe.data.job import ImageJob
    from vigpipe.planning.profile import read_profile
    from vigpipe.planning.ways import check_options
    from vigpipe.profiling.measure import cost_options
    from vigpipe.run.facts import prepare

    run = prepare(
        TrainConfig(
            model=MODEL,
            data=config.data,
            data_dir=config.data_dir,
            batch_size=config.batch,
            steps=config.images // config.batch,
            threads=config.threads,
            seed=config.seed,
        ),
        torch.float32,
    )
    num_blocks = len(run.plan.stages[0])
    for name, layout in layouts.items():
        if layout.pipeline_size > num_blocks:
            raise InputError(
                f"--configs {name}: {layout.pipeline_size} stages for the {num_blocks} blocks of "
                f"{MODEL}; choose at most {num_blocks}"
            )
    assert isinstance(run.job, ImageJob)
    train, test = run.job.source.train, run.job.source.test
    wanted = {"images": config.images, "test_batches": config.test_batches * config.batch}
    for (name, number), split in zip(wanted.items(), (train, test), strict=True):
        if number > len(split):
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: needs {number} images, but {config.data} "
                f"has {len(split)} of them; lower it, or --batch"
            )
    path = profile_path(config)
    if path is not None and (config.profile is not None or path.exists()):
        check_options(read_profile(path), f"--profile {path}", MODEL, cost_options(run))
    return run.job.name, num_blocks


def profile_path(config: StudyConfig) -> Path | None:
    """Return the path of the profile to use if it exists; None if there can be none yet."""
    if config.profile is not None or config.keep_runs is None:
        return config.profile
    return config.keep_runs / "profile.json"
