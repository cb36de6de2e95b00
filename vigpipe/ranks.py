"""Go from checked options to running ranks; unlike `start`, the step before, it imports torch."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from vigpipe.checkpoint.before import as_before, check_training
from vigpipe.checkpoint.manifest import list_checkpoints
from vigpipe.checkpoint.rescue import salvage
from vigpipe.config.choices import Device
from vigpipe.config.files import as_toml
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import OUTLIVING
from vigpipe.config.verbs import InferenceConfig
from vigpipe.errors import DONE, INTERRUPTED, NOT_FINITE, SAVED, WRONG_INPUT, InputError, found_by
from vigpipe.launch.device import (
    allow_tf32,
    count_gpus,
    keep_freed_memory,
    repeat_convolutions,
    weight_dtype,
)
from vigpipe.launch.environment import LONG_WAIT_SECONDS, Launch, threads_per_rank
from vigpipe.launch.failures import remove_records
from vigpipe.launch.join import choose_gpu, join
from vigpipe.launch.local import start_local
from vigpipe.launch.ports import use_ports
from vigpipe.messages import tell
from vigpipe.ops.compiler import be_silent
from vigpipe.parallel.agreement import check_alike
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.values import broadcast_value
from vigpipe.run.events import recorded_replicas
from vigpipe.run.facts import Run, prepare
from vigpipe.run.folder import LOCK, RESULTS, lock, make_output_folder
from vigpipe.run.provenance import provenance
from vigpipe.run.recorded import is_recorded, sync_of
from vigpipe.run.room import check_room
from vigpipe.run.shared_folder import check_shared
from vigpipe.run.stop_and_save import what_is_saved

if TYPE_CHECKING:
    from vigpipe.data.stored import ImageId

# Exit codes after which a restart is useless: ranks would fail again, or were asked to end
# (129 and 143 are 128 + SIGHUP and SIGTERM).
FINAL = (DONE, WRONG_INPUT, SAVED, NOT_FINITE, 129, INTERRUPTED, 143)
TIMEOUT_SECONDS = 60.0  # of collectives in training, where no rank waits long for another
PLANNER = "vigpipe.commands.plan:replan"  # chooses the plan of --stages auto


def run_world(
    config: TrainConfig,
    arguments: Sequence[str],
    work: Callable[[Run, int, torch.device, Path], int | None],
    launch: Launch,
    writes: Sequence[str],
    failures: list[Path],
    *,
    trains: bool,
    main: str,
) -> int:
    """Work as a rank of a run, or start all on this host and wait; see `start.run_on_ranks`."""
    # The options have been checked as far as they go alone. `failures` learns the run's folder.
    timeout = meeting_seconds = config.timeout
    if timeout is None:
        # One rank may compile for minutes while the others wait for what it computes.
        is_prompt = trains and not config.compile
        timeout = TIMEOUT_SECONDS if is_prompt else LONG_WAIT_SECONDS
        config = replace(config, timeout=timeout)
    is_planned = config.stages == "auto"
    if is_planned:
        config = replace(config, stages=_largest_pipeline(config, launch))
    # A launcher's own ranks are all on this host.
    on_host = None if launch.launcher == "alone" else launch.local_world_size
    num_hosts = None
    if config.replay is not None and config.gossip_between == "hosts":
        num_hosts = recorded_replicas(config.replay)
    with found_by("host"):
        dtype, config = weight_dtype(config.dtype), as_before(config)
        run = prepare(config, dtype, ranks_on_host=on_host, num_hosts=num_hosts)
    world_size = run.layout.world_size
    if trains and launch.launcher != "local" and not count_gpus(config.device):
        check_room(run, world_size if launch.launcher == "alone" else launch.local_world_size)
    teams = {}
    if run.config.gossip_between == "hosts":
        teams = {"ranks on a host": launch.local_world_size}
        if launch.local_rank != launch.rank % launch.local_world_size:
            raise InputError(
                f"--gossip-between hosts: expected neighbouring ranks on a host, and rank "
                f"{launch.rank} is number {launch.local_rank} of {launch.local_world_size} on "
                "its host; start them with srun --distribution=block"
            )
    # With a single Slurm task, this process is the only rank; it does not start others.
    is_given = launch.launcher in ("srun", "torchrun") or "SLURM_STEP_NUM_TASKS" in os.environ
    if config.elastic and is_given and launch.launcher != "local":
        if world_size != launch.world_size:
            config = fit_to_world_size(config, run.layout, launch.world_size)
            run = prepare(config, run.dtype)
        world_size = launch.world_size
    starts_ranks = launch.launcher == "alone" and (world_size > 1 or config.max_restarts > 0)
    threads = threads_per_rank(config.threads, world_size if starts_ranks else launch, os.environ)
    if trains and launch.launcher != "local":  # those were checked before they were started
        with found_by("host"):
            check_training(run, threads)
    goes_on = _goes_on(config)
    advice = ", or go on with --resume auto" if trains else ""
    if starts_ranks:
        gpu = check_gpus(config.device, launch, world_size)
    else:
        gpu = set_up_rank(config, run.layout, launch)
    check_device(run, gpu)
    folder = Path()
    if writes and launch.rank == 0:
        folder = make_output_folder(config.out, writes, goes_on=goes_on, advice=advice)
    if starts_ranks:
        if writes:
            arguments = [*arguments, *(["--out", str(folder)] if config.out is None else [])]
            config = replace(config, out=folder)
        num_dispensable = run.layout.num_teams if trains and config.strategy in OUTLIVING else 0
        dispensable = [run.layout.ranks_of_team(team) for team in range(num_dispensable)]
        return _start_ranks(world_size, main, config, arguments, threads, dispensable)

    if writes and launch.rank == 0:
        lock(folder)
        # An earlier run may have had more ranks. One rank alone has not removed its own record
        # either, because it learns its folder only now.
        remove_records(folder, first_rank=world_size if world_size > 1 else 0)
    device = join(
        config.device, gpu, launch, timeout, meeting_seconds, on_one_gpu=on_one_gpu(run.layout)
    )
    if config.sync is None and config.strategy == "synchronous":
        config = replace(config, sync=sync_of(run, device))
        run = replace(run, config=replace(run.config, sync=config.sync))
    if world_size > 1:
        folder = Path(broadcast_value(str(folder), world_size))
        facts = {"software": provenance()["versions"], "hosts": teams}
        # The fingerprint looks at every image file, which not all hosts have in their caches.
        check_alike(
            lambda: {"options": as_toml(config), "data": run.fingerprint, **facts}, world_size
        )
    if writes:
        if launch.rank > 0:
            failures.clear()  # no record shall make the folder on a host that has none
        with found_by("job"):
            check_shared(folder, launch)
        if folder not in failures:
            failures.append(folder)
    if config.skip_bad_images:
        run = prepare(config, run.dtype, _bad_images(run, launch.rank), on_host)
    if is_planned and run.layout.pipeline_size > 1:
        run = resolve_name(PLANNER)(run, launch.rank, device, folder)
    with _saved_before(folder if trains else None):
        return work(run, launch.rank, device, folder) or DONE


@contextmanager
def _saved_before(folder: Path | None) -> Iterator[None]:
    """Let Ctrl-C say which checkpoint is there, where the run has saved none for it."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is None or not (saved := list_checkpoints(folder)):
            raise
        raise KeyboardInterrupt(what_is_saved(folder, saved[0].name)) from None


def _start_ranks(
    world_size: int,
    main: str,
    config: TrainConfig,
    arguments: Sequence[str],
    threads: int,
    dispensable: Sequence[range],
) -> int:
    """Start all ranks on this host, and again if a rank dies, as often as --max-restarts allows."""
    for restart in range(config.max_restarts + 1):
        with _saved_before(config.out):
            code = start_local(world_size, main, arguments, threads, dispensable)
        if code in FINAL or restart == config.max_restarts:
            return code
        salvage(config.out or Path())
        saved = list_checkpoints(config.out or Path())
        if saved or config.resume is None:
            arguments = [*_without(arguments, "--resume"), "--resume", "auto"]
        origin = saved[0].name if saved else "the start"
        tell(f"exit code {code}; restart {restart + 1} of {config.max_restarts}, from {origin}")
    raise AssertionError("the last restart returns")


def fit_to_world_size(config: TrainConfig, layout: Layout, world_size: int) -> TrainConfig:
    """Adapt the layout to the number of ranks: change the replicas, and if need be the stages.

    The batch is cut into as many micro-batches as before, or into the next number that replicas can
    share equally, for BatchNorm. InputError if a plan or --shards does not fit.
    """
    replica_size = layout.replica_size
    if layout.num_shards > 1 and world_size % replica_size:
        raise InputError(
            f"--elastic: {world_size} ranks do not make whole replicas of --shards {replica_size}; "
            "start a multiple of that"
        )
    if world_size % replica_size:
        if isinstance(config.stages, Path):
            raise InputError(
                f"--elastic: {world_size} ranks do not make whole pipelines of {replica_size}, "
                f"which {config.stages} has; give --stages a number, which may change"
            )
        divisors = [s for s in range(1, world_size + 1) if world_size % s == 0]
        replica_size = min(divisors, key=lambda s: (abs(s - layout.pipeline_size), s))
        config = replace(config, stages=replica_size)
    num_replicas = world_size // replica_size
    num_microbatches = -(-layout.num_microbatches * layout.num_replicas // num_replicas)
    return replace(config, dp=num_replicas, microbatches=num_microbatches)


def _goes_on(config: TrainConfig) -> bool:
    """Whether the run uses --out although a run is there: it goes on, or that one got nowhere."""
    folder = config.out
    if config.resume is None or folder is None:
        return False
    if list_checkpoints(folder):
        return config.resume == "auto"
    results = [name for name in RESULTS if os.path.lexists(folder / name)]
    if results and config.resume == "auto":
        raise InputError(
            f"--resume auto: {folder} holds {results[0]}, but no checkpoint to go on from; choose "
            "another --out"
        )
    return not results and (folder / LOCK).exists()


def _without(arguments: Sequence[str], name: str) -> list[str]:
    others: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and argument != name and not argument.startswith(f"{name}="):
            others.append(argument)
        is_value = not is_value and argument == name
    return others


def _largest_pipeline(config: TrainConfig, launch: Launch) -> int:
    """Return the size of pipelines that take all ranks, or as many as this host has room for."""
    num_pipelines = max(1, config.dp) + (config.strategy == "server")
    if launch.launcher != "alone":
        return max(1, launch.world_size // num_pipelines)
    unsplit = prepare(replace(config, stages=1, schedule="gpipe", virtual_stages=1), torch.float32)
    room = count_gpus(config.device)
    if config.device != "cuda" and room < num_pipelines:  # the CPUs, as `join` decides
        cores = threads_per_rank(None, 1, {})
        room = cores // threads_per_rank(config.threads or 1, 1, os.environ)
    return max(
        1, min(room // num_pipelines, unsplit.plan.num_blocks // max(1, config.virtual_stages))
    )


def set_up_rank(
    options: TrainConfig | InferenceConfig, layout: Layout, launch: Launch
) -> int | None:
    """Set this rank's threads, allocator and precision; return its GPU's number, if it has one."""
    with found_by("job"):
        layout.check_world(launch.world_size)
    with found_by("host"):
        gpu = choose_gpu(options.device, launch, count_gpus(options.device, can_compute=True))
    torch.set_num_threads(threads_per_rank(options.threads, launch, os.environ))
    if launch.rank > 0:
        be_silent()
    keep_freed_memory()
    allow_tf32(options.tf32)
    repeat_convolutions()
    use_ports(options.ports, launch)
    return gpu


def check_gpus(requested: Device, launch: Launch, num_ranks: int) -> int | None:
    """Refuse, touching no GPU, to start ranks without one; return the first's, None for the CPU."""
    all_here = replace(launch, world_size=num_ranks, local_world_size=num_ranks)
    return choose_gpu(requested, all_here, count_gpus(requested))


def check_device(run: Run, gpu: int | None) -> None:
    """Refuse what the ranks cannot do on the device that they would take: a GPU, or the CPU."""
    sync = sync_of(run, torch.device("cpu" if gpu is None else "cuda"))
    is_timed = run.config.timing or run.config.trace
    is_recorded(run, sync, on_gpu=gpu is not None, is_timed=is_timed)


def on_one_gpu(layout: Layout) -> str:
    """Return the options with which one GPU sees the micro-batches of this layout."""
    num_microbatches = layout.num_replicas * layout.num_microbatches
    return f"--device cuda --stages 1 --dp 1 --microbatches {num_microbatches}"


def _bad_images(run: Run, rank: int) -> "frozenset[ImageId]":
    """Find the unreadable images; the ranks that read images share the search."""
    # A run on a graph imports nothing of images.
    from vigpipe.data.job import ImageJob
    from vigpipe.run.bad_images import find_bad_images_together

    assert isinstance(run.job, ImageJob)  # the option is for images only
    layout, stored = run.layout, run.job.source.stored
    assert stored is not None
    reads = layout.pipeline_rank(rank) == 0
    images = stored.image_ids()
    share = range(len(images))[layout.replica_index(rank) :: layout.num_replicas] if reads else ()
    return find_bad_images_together(stored.load, images, share, layout.world_size)
