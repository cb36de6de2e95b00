"""From options to ranks: check everything, start missing ranks, bring them together, run."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vigpipe.config import TrainConfig
from vigpipe.errors import DONE, InputError

if TYPE_CHECKING:
    import torch

    from vigpipe.job import Job
    from vigpipe.options import PredictConfig
    from vigpipe.parallel.launch import Launch

Work = Callable[["Job", int, "torch.device", Path], int | None]


def run(
    config: TrainConfig, arguments: Sequence[str], work: Work, *, makes_folder: bool = True
) -> int:
    """Run `work(job, rank, device, folder)` on every rank of the layout.

    Under srun and torchrun this process is one of the ranks. Alone, it is the only rank, or starts
    those that the layout needs through torchrun's agent, each with the same command line.

    Args:
        config: the options as given.
        arguments: the command line behind `python -m vigpipe`, for ranks that are started here.
        work: what a rank does; returns the exit code, None for 0.
        makes_folder: whether it needs an output folder.

    Returns:
        The exit code. Wrong options and data are told before any process group exists.
    """
    from vigpipe.parallel.failure import run_rank
    from vigpipe.parallel.launch import from_environment
    from vigpipe.parallel.local import preload

    launch = from_environment(os.environ)
    if launch.launcher == "alone" and (config.stages != 1 or config.dp > 1):
        preload(
            "vigpipe.evaluate",
            "rich.progress",
            *(["sklearn.datasets"] if config.data == "digits" else []),
        )
    failures = config.out if launch.world_size > 1 else None
    return run_rank(lambda: _run(config, arguments, work, launch, makes_folder), launch, failures)


def _run(
    config: TrainConfig,
    arguments: Sequence[str],
    work: Work,
    launch: "Launch",
    makes_folder: bool,
) -> int:
    from vigpipe.cli import main
    from vigpipe.device import backend, choose_device, weight_dtype
    from vigpipe.job import prepare
    from vigpipe.parallel.launch import init_process_group, threads_per_rank
    from vigpipe.parallel.local import start_local
    from vigpipe.timing.record import make_output_folder

    if config.download and launch.launcher in ("srun", "torchrun"):
        raise InputError(
            f"--download: all {launch.world_size} ranks would fetch at once; fetch before with "
            "python -m vigpipe.train --data cifar10 --download --steps 1, then leave --download out"
        )
    is_planned = config.stages == "auto"
    if is_planned:
        config = replace(config, stages=_stages_there_are(config, launch))
    job = prepare(config, weight_dtype(config.dtype))
    world_size = job.layout.world_size
    if launch.launcher == "alone" and world_size > 1:
        choose_device(config.device, 0, world_size)
        if makes_folder:
            folder = make_output_folder(config.out)
            arguments = [*arguments, *(["--out", str(folder)] if config.out is None else [])]
        threads = threads_per_rank(config.threads, world_size, os.environ)
        return start_local(world_size, main, arguments, threads)

    device = claim_device(config, job, launch)
    folder = make_output_folder(config.out) if makes_folder and launch.rank == 0 else Path()
    if world_size > 1:
        init_process_group(launch, backend(device), config.timeout)
        folder = Path(_from_rank_0(str(folder)))
    if config.skip_bad_images:
        job = prepare(config, job.dtype, _bad_images(job, launch.rank))
    if is_planned and job.layout.num_stages > 1:
        from vigpipe.propose import replanned

        job = replanned(job, launch.rank, device, folder)
    return work(job, launch.rank, device, folder) or DONE


def _stages_there_are(config: TrainConfig, launch: "Launch") -> int:
    """Stages of a pipeline that takes all ranks, or all that this host has room for."""
    import torch

    from vigpipe.job import prepare
    from vigpipe.parallel.launch import threads_per_rank

    if launch.launcher != "alone":
        return max(1, launch.world_size // max(1, config.dp))
    one = prepare(replace(config, stages=1, schedule="gpipe", virtual_stages=1), torch.float32)
    num_blocks = sum(len(blocks) for blocks in one.plan.stages)
    if torch.cuda.is_available() and config.device != "cpu":
        room = torch.cuda.device_count()
    else:
        cores = threads_per_rank(None, 1, {})
        room = cores // threads_per_rank(config.threads or 1, 1, os.environ)
    return max(1, min(room // max(1, config.dp), num_blocks // max(1, config.virtual_stages)))


def claim_device(
    options: "TrainConfig | PredictConfig", job: "Job", launch: "Launch"
) -> "torch.device":
    """Where this rank of the layout computes, with its threads set.

    Raises:
        InputError: there are more or fewer ranks than the layout has, or no such device.
    """
    import torch

    from vigpipe.device import choose_device, keep_freed_memory
    from vigpipe.ops.compiler import be_silent
    from vigpipe.parallel.launch import threads_per_rank

    job.layout.check_world(launch.world_size)
    device = choose_device(options.device, launch.local_rank, launch.local_world_size)
    torch.set_num_threads(threads_per_rank(options.threads, launch, os.environ))
    if launch.rank > 0:
        be_silent()
    keep_freed_memory()
    return device


def _from_rank_0(text: str) -> str:
    import torch.distributed as dist

    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _bad_images(job: "Job", rank: int) -> frozenset[Path]:
    """Unreadable images of the data folder; the ranks that will read images share the search."""
    import torch.distributed as dist

    from vigpipe.data.images import find_bad_images, list_images

    layout = job.layout
    found: frozenset[Path] = frozenset()
    if Path(job.config.data).is_dir() and layout.stage_index(rank) == 0:
        paths = list_images(Path(job.config.data))
        found = frozenset(find_bad_images(paths[layout.replica_index(rank) :: layout.num_replicas]))
    if layout.world_size == 1:
        return found
    everyone: list[frozenset[Path]] = [frozenset()] * layout.world_size
    dist.all_gather_object(everyone, found)
    return frozenset().union(*everyone)
