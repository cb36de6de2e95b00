"""From options to ranks: check everything, start missing ranks, bring them together, run."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from vigpipe.config.files import as_toml
from vigpipe.config.options import TrainConfig, flag
from vigpipe.errors import DONE, INTERRUPTED, NOT_FINITE, SAVED, WRONG_INPUT, InputError

if TYPE_CHECKING:
    import torch

    from vigpipe.config.verbs import PredictConfig
    from vigpipe.launch.environment import Launch
    from vigpipe.parallel.layout import Layout
    from vigpipe.run.facts import Run

# Exit codes after which ranks would fail again, or were asked to end (128 + SIGHUP, SIGTERM).
FINAL = (DONE, WRONG_INPUT, SAVED, NOT_FINITE, 129, INTERRUPTED, 143)
TIMEOUT_SECONDS = 60.0  # of collectives in training, where no rank has long work of its own
PLANNER = "vigpipe.commands.plan:replan"  # of --stages auto
FOR_TRAINING = ("resume", "max_restarts", "elastic", "stop_before")


def run_on_ranks(
    config: TrainConfig,
    arguments: Sequence[str],
    work: str,
    options: Mapping[str, Any] | None = None,
    *,
    makes_folder: bool = True,
    trains: bool = False,
) -> int:
    """Run `work(job, rank, device, folder, **options)` on every rank of the layout.

    Under srun and torchrun this process is one of the ranks. Alone, it is the only rank, or starts
    those that the layout needs through torchrun's agent, each with the same command line.

    Args:
        config: the options as given.
        arguments: the command line behind `python -m vigpipe`, for ranks that are started here.
        work: what a rank does, as "module:function"; returns the exit code, None for 0. Imported
            by the rank, so that a process that only starts ranks does not wait for its imports
            before it begins with theirs.
        options: for work.
        makes_folder: whether it needs an output folder.
        trains: whether it is a training run, which saves and goes on, and in which no rank waits
            long for another.

    Returns:
        The exit code. Wrong options and data are told before any process group exists.
    """
    from vigpipe.launch.environment import from_environment
    from vigpipe.launch.failures import run_rank
    from vigpipe.launch.local import preload

    launch = from_environment(os.environ)
    several = config.stages != 1 or config.dp > 1 or config.max_restarts > 0
    if launch.launcher == "alone" and several:
        # Not what may be run as python -m vigpipe.train: Python would warn.
        preload("vigpipe.run.evaluation", "rich.progress")

    def do(*share: Any) -> int | None:  # noqa: ANN401
        return resolve_name(work)(*share, **options or {})

    # Of a default folder all ranks learn only when they have met.
    failures = [config.out] if config.out is not None and launch.world_size > 1 else []
    return run_rank(
        lambda: _run(config, arguments, do, launch, makes_folder, trains, failures),
        launch,
        failures,
    )


def _run(
    config: TrainConfig,
    arguments: Sequence[str],
    work: Callable[["Run", int, "torch.device", Path], int | None],
    launch: "Launch",
    makes_folder: bool,
    trains: bool,
    failures: list[Path],
) -> int:
    from vigpipe.launch.device import backend, choose_device, weight_dtype
    from vigpipe.launch.environment import PATIENCE_SECONDS, threads_per_rank
    from vigpipe.launch.failures import remove_records
    from vigpipe.launch.rendezvous import init_process_group
    from vigpipe.parallel.agreement import broadcast_value, check_alike
    from vigpipe.run.facts import prepare
    from vigpipe.run.folder import lock, make_output_folder
    from vigpipe.run.provenance import provenance

    for name in FOR_TRAINING:
        if getattr(config, name) and not trains:
            raise InputError(f"{flag(name)} {getattr(config, name)}: is for vigpipe train only")
    if config.resume == "auto" and config.out is None:
        raise InputError("--resume auto: goes on with the run in --out; name that folder")
    if config.download and launch.launcher in ("srun", "torchrun"):
        raise InputError(
            f"--download: all {launch.world_size} ranks would fetch at once; fetch before with "
            "python -m vigpipe.train --data cifar10 --download --steps 1, then leave --download out"
        )
    timeout = config.timeout
    if timeout is None:
        timeout = TIMEOUT_SECONDS if trains else PATIENCE_SECONDS
        config = replace(config, timeout=timeout)
    is_planned = config.stages == "auto"
    if is_planned:
        config = replace(config, stages=_stages_there_are(config, launch))
    run = prepare(config, weight_dtype(config.dtype))
    world_size = run.layout.world_size
    # A step of one task is one rank, not a place to start ranks in.
    counts = launch.launcher in ("srun", "torchrun") or "SLURM_STEP_NUM_TASKS" in os.environ
    if config.elastic and counts and launch.launcher != "local":
        if world_size != launch.world_size:
            config = fit_to_world_size(config, run.layout, launch.world_size)
            run = prepare(config, run.dtype)
        world_size = launch.world_size
    goes_on = config.resume == "auto" or (config.resume is not None and _has_saved_nothing(config))
    if launch.launcher == "alone" and (world_size > 1 or config.max_restarts):
        choose_device(config.device, 0, world_size)
        if makes_folder:
            folder = make_output_folder(config.out, goes_on)
            arguments = [*arguments, *(["--out", str(folder)] if config.out is None else [])]
            config = replace(config, out=folder)
        threads = threads_per_rank(config.threads, world_size, os.environ)
        return _start_ranks(world_size, config, arguments, threads)

    device = set_up_device(config, run, launch)
    folder = Path()
    if makes_folder and launch.rank == 0:
        folder = make_output_folder(config.out, goes_on)
        lock(folder)
        # Of an earlier run of more ranks. A rank alone has learned its folder only now, too.
        remove_records(folder, first_rank=world_size if world_size > 1 else 0)
    if world_size > 1:
        init_process_group(launch, backend(device), timeout)
        folder = Path(broadcast_value(str(folder), world_size))
        check_alike(
            {
                "options": as_toml(config),
                "data": run.fingerprint,
                "software": provenance()["versions"],
            },
            world_size,
        )
    if makes_folder and folder not in failures:
        failures.append(folder)
    if config.skip_bad_images:
        run = prepare(config, run.dtype, _bad_images(run, launch.rank))
    if is_planned and run.layout.pipeline_size > 1:
        run = resolve_name(PLANNER)(run, launch.rank, device, folder)
    return work(run, launch.rank, device, folder) or DONE


def _start_ranks(
    world_size: int, config: TrainConfig, arguments: Sequence[str], threads: int
) -> int:
    """Start the ranks here, and again after one has died, as often as --max-restarts allows."""
    from vigpipe.checkpoint.manifest import list_checkpoints
    from vigpipe.checkpoint.rescue import salvage
    from vigpipe.launch.local import COMMAND_LINE, start_local

    for restart in range(config.max_restarts + 1):
        code = start_local(world_size, COMMAND_LINE, arguments, threads)
        if code in FINAL or restart == config.max_restarts:
            return code
        salvage(config.out or Path())
        saved = list_checkpoints(config.out or Path())
        if saved or config.resume is None:
            arguments = [*_without(arguments, "--resume"), "--resume", "auto"]
        begin = saved[0].name if saved else "the start"
        sys.stderr.write(
            f"exit code {code}; restart {restart + 1} of {config.max_restarts}, from {begin}\n"
        )
    raise AssertionError("the last restart returns")


def fit_to_world_size(config: TrainConfig, layout: "Layout", world_size: int) -> TrainConfig:
    """The options for the ranks there are: other replicas, and where those do not do other stages.

    The micro-batches of a replica change so that the batch is cut into as many as before, or into
    the next number that the replicas can share: BatchNorm then sees the same micro-batches.

    Raises:
        InputError: --stages is a plan, and no number of replicas fits it to the ranks.
    """
    stages = layout.pipeline_size
    if world_size % stages:
        if isinstance(config.stages, Path):
            raise InputError(
                f"--elastic: {world_size} ranks are no whole pipelines of {stages}, which "
                f"{config.stages} has; give --stages a number, which may change"
            )
        whole = [s for s in range(1, world_size + 1) if world_size % s == 0]
        stages = min(whole, key=lambda s: (abs(s - stages), s))
        config = replace(config, stages=stages)
    replicas = world_size // stages
    microbatches = -(-layout.num_microbatches * layout.num_replicas // replicas)
    return replace(config, dp=replicas, microbatches=microbatches)


def _has_saved_nothing(config: TrainConfig) -> bool:
    """Whether --out holds a run that ended before its first checkpoint: it may begin again."""
    from vigpipe.checkpoint.manifest import list_checkpoints

    folder = config.out or Path()
    return not list_checkpoints(folder) and not (folder / "summary.json").exists()


def _without(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments without a flag and what it is given."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument != name and not argument.startswith(f"{name}="):
            kept.append(argument)
        skip = not skip and argument == name
    return kept


def _stages_there_are(config: TrainConfig, launch: "Launch") -> int:
    """Stages of a pipeline that takes all ranks, or all that this host has room for."""
    import torch

    from vigpipe.launch.environment import threads_per_rank
    from vigpipe.run.facts import prepare

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


def set_up_device(
    options: "TrainConfig | PredictConfig", run: "Run", launch: "Launch"
) -> "torch.device":
    """Where this rank of the layout computes, with its threads set.

    Raises:
        InputError: there are more or fewer ranks than the layout has, or no such device.
    """
    import torch

    from vigpipe.launch.device import choose_device, keep_freed_memory
    from vigpipe.launch.environment import threads_per_rank
    from vigpipe.ops.compiler import be_silent

    run.layout.check_world(launch.world_size)
    device = choose_device(options.device, launch.local_rank, launch.local_world_size)
    torch.set_num_threads(threads_per_rank(options.threads, launch, os.environ))
    if launch.rank > 0:
        be_silent()
    keep_freed_memory()
    return device


def _bad_images(run: "Run", rank: int) -> frozenset[Path]:
    """Unreadable images of the data folder; the ranks that will read images share the search."""
    from vigpipe.data.images import find_bad_images, list_images
    from vigpipe.parallel.agreement import all_gather_values, run_with_heartbeats

    layout = run.layout

    def look() -> list[Path]:
        folder = Path(os.path.expanduser(run.config.data))
        if layout.pipeline_rank(rank) > 0 or not os.path.isdir(folder):
            return []
        mine = list_images(folder)[layout.replica_index(rank) :: layout.num_replicas]
        return list(find_bad_images(mine))

    found = run_with_heartbeats(look, layout.world_size)  # every image is decoded
    return frozenset(path for each in all_gather_values(found, layout.world_size) for path in each)
