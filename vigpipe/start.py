"""Refuse options that are wrong by themselves, before `ranks` is imported, and with it torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from vigpipe.config.of_weights import follow_weights
from vigpipe.config.options import TrainConfig, flag
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.resolve import resolved
from vigpipe.errors import InputError, found_by
from vigpipe.launch.environment import Launch, from_environment, threads_per_rank
from vigpipe.launch.failures import Advice, run_rank
from vigpipe.launch.local import preload
from vigpipe.launch.ports import parse_ports
from vigpipe.parallel.layout import Layout
from vigpipe.run.open_job import MODULES
from vigpipe.run.stop_and_save import parse_stop_before

COMMAND_LINE = "vigpipe.cli:main"  # what the ranks of a command run
SKIP = "leave unreadable images out with --skip-bad-images"
ONLY_FOR_TRAINING = ("resume", "max_restarts", "elastic", "stop_before", "replay")


def run_on_ranks(
    config: TrainConfig,
    arguments: Sequence[str],
    work: str,
    writes: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    *,
    trains: bool = False,
    any_strategy: bool = False,
    main: str = COMMAND_LINE,
    check: Callable[[TrainConfig], None] | None = None,
) -> int:
    """Run `work(run, rank, device, folder, **options)` on every rank; return the exit code.

    Under srun and torchrun, this process is one of the ranks. Otherwise it is the only rank, or it
    starts the ranks of the layout on this host, which give the same `arguments` to `main`.

    `work` and `main` are "module:function". Only ranks import the work, which returns None for 0:
    a process that starts ranks must not wait for its imports. `writes` are names in the output
    folder; without any, none is made. What `trains` may be saved and resumed, and no rank waits
    long for another. With `any_strategy`, the work knows replicas that take steps of their own.
    `check` raises for what else options are refused for, before anything else is done.
    """
    launch = from_environment(os.environ)
    # The ranks learn the name of a default folder only when they have met.
    failures = [config.out] if config.out is not None and launch.world_size > 1 else []

    def work_as_rank(*rank_arguments: Any) -> int | None:
        return resolve_name(work)(*rank_arguments, **options or {})

    followed = config

    def run() -> int:
        nonlocal followed
        with found_by("job"):
            threads_per_rank(config.threads, 1, os.environ)  # before torch starts too many
        with found_by("host"):
            followed = follow_weights(config)
        with found_by("job"):
            if check is not None:
                check(followed)
            _check_options(followed, launch, trains=trains, any_strategy=trains or any_strategy)
        _preload(followed, launch, main)
        # torch is imported here, while the process that ranks are forked from imports it too.
        from vigpipe.ranks import run_world

        return run_world(
            followed, arguments, work_as_rank, launch, writes, failures, trains=trains, main=main
        )

    return run_rank(run, launch, failures, lambda: _advice(followed))


def _advice(config: TrainConfig) -> Advice:
    if MODEL_DEFAULTS[config.model].job == "graph":
        return Advice(
            "take smaller sub-graphs (--sampler), a smaller --width, more ranks with --shards, or "
            "more memory, or see whether --data is as large as it should be"
        )
    return Advice(
        "take more --microbatches, --recompute except-last, a smaller --batch-size, or more memory",
        None if config.skip_bad_images else SKIP,
    )


def _check_options(
    config: TrainConfig, launch: Launch, *, trains: bool, any_strategy: bool
) -> None:
    """Raise InputError for what is wrong whatever the data and the device are."""
    for name in ONLY_FOR_TRAINING:
        if getattr(config, name) and not trains:
            raise InputError(f"{flag(name)} {getattr(config, name)}: is for vigpipe train only")
    if config.strategy != "synchronous" and not any_strategy:
        raise InputError(f"--strategy {config.strategy}: is for vigpipe train, check and time")
    if config.resume == "auto" and config.out is None:
        raise InputError("--resume auto: goes on with the run in --out; name that folder")
    if config.download and launch.launcher in ("srun", "torchrun"):
        raise InputError(
            f"--download: all {launch.world_size} ranks would fetch at once; fetch before with "
            "vigpipe train --data cifar10 --download --steps 1, then leave --download out"
        )
    resolved(config)
    if isinstance(config.stages, int):  # otherwise a plan says how many, or what has been measured
        Layout(
            config.stages,
            config.microbatches,
            config.dp,
            config.schedule,
            config.virtual_stages,
            num_shards=config.shards,
        )
    if config.ports is not None:
        parse_ports(config.ports)
    if trains and launch.launcher != "local":  # time has passed for ranks that were started here
        parse_stop_before(config.stop_before, os.environ)


def _preload(config: TrainConfig, launch: Launch, main: str) -> None:
    """Let the process that ranks are forked from begin with its imports, if this one starts any."""
    has_server = config.strategy == "server"
    is_several = config.stages != 1 or config.dp + has_server > 1 or config.shards > 1
    if launch.launcher == "alone" and (is_several or config.max_restarts > 0):
        of_job = MODULES[MODEL_DEFAULTS[config.model].job]
        modules = "vigpipe.ranks", "vigpipe.training", of_job, "vigpipe.ops.registered"
        preload(main, *modules, "rich.progress")
