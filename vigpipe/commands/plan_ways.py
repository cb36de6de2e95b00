"""What the ranks of `vigpipe plan --ranks m` do: say which way to use m ranks on one graph."""

import shlex
from pathlib import Path

import torch
from tabulate import tabulate

from vigpipe.commands.cluster import FREE_MESSAGES, network, quantity
from vigpipe.commands.start_plan import CHOSEN, UNUSED, plan_file
from vigpipe.config.options import as_given, flag, given
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.planning.choose_way import Choice, Cluster, Outcome, choose
from vigpipe.planning.ways import Measured, check_options, read_measured, write_measured
from vigpipe.profiling.ways import measure_ways, on_one_rank, ways_options
from vigpipe.run.facts import Run


def propose_way(
    run: Run, rank: int, device: torch.device, folder: Path, config: PlanConfig
) -> None:
    """Measure as one of several ranks; rank 0 then chooses, prints and writes what it measured."""
    assert config.ranks is not None
    run = on_one_rank(run, config)
    if config.profile is None:
        measured = measure_ways(run, rank, device, config.ranks)
    else:
        measured = read_measured(config.profile)
        where = f"--profile {config.profile}"
        check_options(measured, where, run.config.model, ways_options(run))
        if measured.num_ranks != config.ranks:
            raise InputError(
                f"{where}: was measured with --ranks {measured.num_ranks}, but this run has "
                f"--ranks {config.ranks}; leave --profile out to measure anew"
            )
    if rank != 0:
        return
    out = plan_file(config)
    if config.profile is None:
        write_measured(measured, out)
    limit = quantity(config, "memory_limit")
    cluster = Cluster(
        *network(config), config.ranks_per_host, None if limit is None else int(limit)
    )
    choice = choose(measured, cluster)
    print(f"{table(choice)}\n\n{choice.reason}")
    if measured.links.num_ranks == 1 and cluster.bandwidth is None:
        print(FREE_MESSAGES)
    source = config.profile or out
    print(f"{source}; take it with {command(choice.best, measured, config)}")


def table(choice: Choice) -> str:
    """Make a table of all ways, the fastest epoch first."""
    lines = [
        (
            _mark(outcome, choice),
            outcome.way.name,
            outcome.way.options,
            "yes" if outcome.way.is_same else "no",
            f"{outcome.epoch_seconds:.3g}",
            f"{outcome.way.steps_per_epoch:,}",
            f"{outcome.sent_bytes / 1e6:,.1f}",
            f"{outcome.sent_bytes * outcome.way.steps_per_epoch / 1e6:,.1f}",
            f"{outcome.peak_bytes / 1e6:,.0f}",
        )
        for outcome in sorted(choice.outcomes, key=lambda outcome: outcome.epoch_seconds)
    ]
    headers = ["", "way", "options", "steps of one rank", "s an epoch", "steps"]
    headers += ["MB sent a step", "an epoch", "MB of the fullest rank"]
    return tabulate(lines, headers, disable_numparse=True)


def _mark(outcome: Outcome, choice: Choice) -> str:
    if not outcome.fits:
        return "does not fit"
    return "take" if outcome is choice.best else ""


def command(best: Outcome, measured: Measured, config: PlanConfig) -> str:
    """Return the command that trains in the way to take, with the threads that measured it."""
    chosen = best.way.options.split()
    left_out = {*CHOSEN, *UNUSED, "microbatches", "model", "data", "out", "config", "threads"}
    words = ["vigpipe", "train", "--model", config.model, "--data", config.data]
    for name, value in given(config).items():
        if not (name in left_out or flag(name) in chosen):
            words += as_given(name, value).split(" ", 1)
    if isinstance(config.microbatches, int) and config.microbatches > 1:
        words += [] if "--microbatches" in chosen else ["--microbatches", str(config.microbatches)]
    threads = config.threads or measured.facts.get("threads")
    words += [*chosen, *(["--threads", str(threads)] if isinstance(threads, int) else [])]
    return shlex.join(words)
