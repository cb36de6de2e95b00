"""What the ranks of `vigpipe plan` do: measure, simulate, and write the best cut as a plan."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import torch
from tabulate import tabulate

from vigpipe.commands.cluster import FREE_MESSAGES, network, quantity
from vigpipe.commands.start_plan import PLAN_MARK, plan_file, profile_beside
from vigpipe.config.choices import Sync
from vigpipe.config.options import OPTIONS, TrainConfig, as_given, given
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.launch.device import default_sync, has_own_cores
from vigpipe.messages import one_line
from vigpipe.parallel.plan import Plan, describe_cut, even_plan
from vigpipe.parallel.values import broadcast_value
from vigpipe.planning.explain import explain
from vigpipe.planning.interval import Interval, interval_text, step_interval
from vigpipe.planning.profile import Profile, read_profile, with_network, write_profile
from vigpipe.planning.search import search
from vigpipe.planning.step import Proposal, Request
from vigpipe.planning.ways import check_options
from vigpipe.profiling.measure import cost_options, measure_profile, microbatch_sizes_to_profile
from vigpipe.run.facts import Run
from vigpipe.schedules import Schedule
from vigpipe.timing.timeline import draw_timeline

_MOST_SIZES = 4  # largest number of micro-batch sizes that are profiled
_CROWDED = 1.5  # slowdown beside other ranks that shared caches and memory cannot explain
# Numbers of micro-batches that are tried with `auto`, up to eight per stage.
_MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
# Schedules that are tried with `auto`, and their stages per rank.
_SCHEDULES: dict[Schedule, int] = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "loopedbfs": 2}


def propose(run: Run, rank: int, device: torch.device, folder: Path, config: PlanConfig) -> None:
    """Measure one stage as one of several ranks; rank 0 then searches, prints and writes a plan."""
    profile = None if config.profile is None else read_profile(config.profile)
    run = replace(run, config=replace(run.config, sync=_sync(config, profile, device)))
    request = make_request(config, run)
    if profile is None:
        sizes = microbatch_sizes_to_profile(
            request.batch_size, request.num_replicas, request.microbatches, _MOST_SIZES
        )
        profile = measure_profile(run, rank, device, sizes)
        if profile is not None and has_own_cores(device):
            profile = _with_as_many_gpus(profile, request.num_ranks * request.num_replicas)
    else:
        check_options(profile, f"--profile {config.profile}", run.config.model, cost_options(run))
    if profile is None:
        return
    profile = with_network(profile, *network(config))
    best, *others = search(profile, request)
    out = plan_file(config)
    shown = [best, *others[:1]]
    intervals = [step_interval(profile, request, proposal) for proposal in shown]
    write_plan(best, intervals[0], profile, request, config, out)
    if config.profile is None:
        write_profile(profile, profile_beside(out))
    picture = out.with_suffix(".png")
    draw_timeline({f"predicted: {_described(best)}": best.spans}, [picture])
    print(_table(shown, intervals, run.job.unit, request))
    had_neighbour = run.layout.world_size > 1 or config.profile is not None
    if request.num_ranks > 1 and not had_neighbour and config.bandwidth is None:
        print(FREE_MESSAGES)
    if profile.slowdown[-1] > _CROWDED:
        print(
            f"{len(profile.slowdown)} ranks at once were {profile.slowdown[-1]:.2f} times as slow "
            "as one: this host was busy, or its cores share too much; plan again when it is idle"
        )
    if config.explain:
        print(explain(profile, request, best))
    print(f"{out}, {picture}; use it with {_command(best, config, out)}")


def _sync(config: PlanConfig, profile: Profile | None, device: torch.device) -> Sync:
    """Return how gradients will be added up: as asked for, as measured before, or by default."""
    if config.sync is not None:
        return config.sync
    measured = profile.options.get("sync") if profile is not None else None
    if measured in get_args(Sync):
        return cast(Sync, measured)
    return default_sync(device, config.stages, config.stages * config.dp)


def _with_as_many_gpus(profile: Profile, num_ranks: int) -> Profile:
    """Give ranks that could not measure the last slowdown; GPUs, unlike cores, are not shared."""
    missing = num_ranks - len(profile.slowdown)
    slowdown, *rounds = (
        (*factors, *[factors[-1]] * missing) for factors in (profile.slowdown, *profile.rounds)
    )
    return replace(profile, slowdown=slowdown, rounds=tuple(rounds))


def replan(run: Run, rank: int, device: torch.device, folder: Path) -> Run:
    """Measure together; return the run with the best cut (`--stages auto`), which rank 0 writes."""
    layout, num_replicas = run.layout, run.layout.num_replicas
    if run.config.strategy != "synchronous":  # a step is then that of a single replica
        num_replicas = 1
    path = folder / "plan.toml"
    profile = measure_profile(run, rank, device, [run.microbatch_size])
    told: list[Any] = []
    if profile is not None:
        request = Request(
            num_ranks=layout.pipeline_size,
            num_replicas=num_replicas,
            batch_size=run.batch_size * num_replicas // layout.num_replicas,
            microbatches=(layout.num_microbatches,),
            schedules=((layout.schedule, layout.virtual_stages),),
            sync=run.config.sync or default_sync(device, layout.pipeline_size, layout.world_size),
            typical=run.job.typical_microbatch,
        )
        best = search(profile, request)[0]
        interval = step_interval(profile, request, best)
        write_plan(best, interval, profile, request, run.config, path)
        write_profile(profile, profile_beside(path))
        note = f"planned: {_described(best)}, {1e3 * best.step_seconds:.1f} ms a step; see {path}"
        told = [list(map(list, best.stages)), note]
    stages, note = broadcast_value(told, layout.world_size)
    return replace(
        run,
        plan=Plan(tuple(map(tuple, stages))),
        config=replace(run.config, stages=path),
        notes=(*run.notes, note),
    )


def make_request(config: PlanConfig, run: Run) -> Request:
    """Make the planner's request from the options; raises InputError for numbers out of range."""
    assert run.config.sync is not None
    if config.stages < 1 or config.dp < 1:
        raise InputError(f"--stages {config.stages}, --dp {config.dp}: must be at least 1")
    num_blocks = run.plan.num_blocks
    even_plan(num_blocks, config.stages)
    typical = run.job.typical_microbatch
    most = run.job.most_microbatches(run.layout) // config.dp
    if config.microbatches == "auto" and typical is not None:
        raise InputError(
            f"--microbatches auto: with --model {config.model} their number decides how many "
            f"{run.job.unit} a step is taken with; give one, from 1 to {most}"
        )
    if config.microbatches == "auto":
        most_sensible = min(most, 8 * max(2, config.stages))
        counts = tuple(m for m in _MICROBATCHES if m <= most_sensible)
    else:
        counts = (config.microbatches,)
    if not counts or not 1 <= counts[0] <= most:
        what = f"cut a batch of {run.batch_size} samples into micro-batches of at least one"
        if typical is not None:
            what = "be micro-batches of a step, of which an epoch has enough"
        raise InputError(
            f"--microbatches {config.microbatches} x --dp {config.dp}: must {what}; choose 1 to "
            f"{most}"
        )
    schedules: tuple[tuple[Schedule, int], ...] = tuple(
        (name, v) for name, v in _SCHEDULES.items() if v * config.stages <= num_blocks
    )
    if config.schedule != "auto":
        schedules = ((config.schedule, config.virtual_stages),)
        even_plan(num_blocks, config.stages * config.virtual_stages)
    limit = quantity(config, "memory_limit")
    return Request(
        num_ranks=config.stages,
        num_replicas=config.dp,
        batch_size=run.batch_size,
        microbatches=counts,
        schedules=schedules,
        memory_limit_bytes=None if limit is None else int(limit),
        ranks_per_host=config.ranks_per_host,
        sync=run.config.sync,
        typical=typical,
    )


def write_plan(
    best: Proposal,
    interval: Interval | None,
    profile: Profile,
    request: Request,
    config: TrainConfig,
    out: Path,
) -> None:
    """Write a plan file, with its predictions and the command to use it with as comments."""
    facts = profile.facts
    versions = facts.get("versions", {})
    slower = ", ".join(f"{factor:.2f}" for factor in profile.slowdown)
    memory = ", ".join(f"{num_bytes / 1e6:.0f}" for num_bytes in best.memory_bytes)
    within = "" if interval is None else f" ({interval_text(interval)} in 9 of 10 runs)"
    comments = (  # a profile may hold other lines, which would become part of the plan
        f"{PLAN_MARK}, {facts.get('date')}, vigpipe {versions.get('vigpipe')}, commit "
        f"{facts.get('commit')}.",
        f"# Profile: {facts.get('hardware')}, {facts.get('threads')} thread(s) a rank, torch "
        f"{versions.get('torch')}; a message takes {1e6 * profile.latency_seconds:.0f} µs and its "
        f"bytes at {8 * profile.bandwidth / 1e9:.3g} Gb/s; 1, 2, ... ranks at once are {slower} "
        "times as slow.",
        f"# Promise: {_described(best)}, {_step(best, profile, request)}: "
        f"{1e3 * best.step_seconds:.1f} ms a step{within}, bubble {best.bubble:.1%}, memory of the "
        f"ranks {memory} MB.",
        f"# Use: {_command(best, config, out)}",
    )
    lines = [
        *map(one_line, comments),
        f'model = "{profile.model}"',
        "stages = [",
        *(f"    [{', '.join(map(str, blocks))}]," for blocks in best.stages),
        "]",
    ]
    with told_if_unwritable(f"--out {out}", "choose another file"):
        write_atomically(out, "\n".join(lines) + "\n")


def _step(proposal: Proposal, profile: Profile, request: Request) -> str:
    if not profile.amounts:
        return f"batch {request.batch_size}"
    return f"{request.num_samples(proposal.num_microbatches):,.0f} {profile.amounts[0]} a step"


def _described(proposal: Proposal) -> str:
    virtual = f" ({proposal.virtual_stages} each)" if proposal.virtual_stages > 1 else ""
    cut = describe_cut(proposal.stages)
    return f"{cut} blocks, {proposal.num_microbatches} micro-batches, {proposal.schedule}{virtual}"


def _command(best: Proposal, config: TrainConfig, out: Path) -> str:
    words = ["vigpipe", "train", "--model", config.model, "--stages", str(out)]
    words += ["--microbatches", str(best.num_microbatches), "--schedule", best.schedule]
    if best.virtual_stages > 1:
        words += ["--virtual-stages", str(best.virtual_stages)]
    if config.dp > 1:
        words += ["--dp", str(config.dp)]
    if MODEL_DEFAULTS[config.model].job == "graph":
        words += ["--data", config.data]
    of_graphs = [name for name, facts in OPTIONS.items() if facts.job == "graph"]
    for name, value in given(config, ("batch_size", *of_graphs)).items():
        words += as_given(name, value).split()
    return shlex.join(words)


def _table(
    proposals: Sequence[Proposal],
    intervals: Sequence[Interval | None],
    unit: str,
    request: Request,
) -> str:
    names = ("best", "runner-up")
    rows = [
        {
            "": name,
            "blocks": describe_cut(p.stages),
            "schedule": p.schedule + (f" ×{p.virtual_stages}" if p.virtual_stages > 1 else ""),
            "M": p.num_microbatches,
            "step, ms": f"{1e3 * p.step_seconds:.1f}",
            "9 of 10 runs": interval_text(interval),
            f"{unit}/s": f"{request.num_samples(p.num_microbatches) / p.step_seconds:,.1f}",
            "bubble": f"{p.bubble:.1%}",
            "memory of a rank, MB": ", ".join(f"{b / 1e6:.0f}" for b in p.memory_bytes),
        }
        for name, p, interval in zip(names, proposals, intervals, strict=False)
    ]
    if None in intervals:  # an older profile does not tell
        rows = [{name: row[name] for name in row if name != "9 of 10 runs"} for row in rows]
    return tabulate(rows, headers="keys", disable_numparse=True)
