"""The command `vigpipe plan` up to its ranks, `plan` or `plan_ways`; does not import torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vigpipe.commands.cluster import check_cluster, ranks_to_measure
from vigpipe.config.choices import OF_LAYERS
from vigpipe.config.of_weights import follow_weights
from vigpipe.config.options import as_given, given
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.verbs import PlanConfig
from vigpipe.errors import InputError
from vigpipe.files.outputs import check_new_file
from vigpipe.planning.profile import PROFILE_MARK, read_profile
from vigpipe.planning.ways import WAYS_MARK, read_measured
from vigpipe.start import run_on_ranks
from vigpipe.timing.timeline import MADE_BY

PLAN_MARK = "# Made by vigpipe plan"
# What the command chooses itself, or has no use for.
CHOSEN = (
    *("stages", "dp", "shards", "split", "adjacency", "chunks", "halo"),
    *("schedule", "virtual_stages"),
)
UNUSED = ("explain", "compress")


def run_plan(config: PlanConfig, arguments: Sequence[str]) -> int:
    """Run `vigpipe plan`, on ranks that measure how much they slow each other down."""
    config = follow_weights(config)
    if config.sparse_threads:
        raise InputError(
            f"--sparse-threads {config.sparse_threads}: vigpipe plan measures ranks that sum and "
            "multiply on the same threads; leave it out"
        )
    if config.ranks is not None:
        return _run_plan_ways(config, config.ranks, arguments)
    if config.shards > 1:
        raise InputError(
            f"--shards {config.shards}: vigpipe plan predicts stages and replicas; leave it out, "
            f"or compare all ways to use {config.shards} ranks with --ranks {config.shards}"
        )
    check_cluster(config)
    if config.profile is not None:
        read_profile(config.profile)  # refuses what it is not; rank 0 reads it again
    out = plan_file(config)
    check_new_file(out, "--out ", (".toml",), mark=PLAN_MARK, overwrite=None)
    check_new_file(profile_beside(out), "--out ", (".json",), mark=PROFILE_MARK, overwrite=None)
    check_new_file(out.with_suffix(".png"), "--out ", (".png",), mark=MADE_BY, overwrite=None)
    num_ranks = ranks_to_measure(config, config.stages * config.dp)
    one_stage = replace(
        config,
        stages=1,
        dp=num_ranks,
        microbatches=1,
        schedule="gpipe",
        out=None,
        cuda_graph=None,  # parts are timed, which a recorded step lacks
    )
    work = "vigpipe.commands.plan:propose"
    return run_on_ranks(one_stage, arguments, work, options={"config": config})


def plan_file(config: PlanConfig) -> Path:
    """Return the plan file to write, or with --ranks that of the measured costs."""
    number = f"{config.stages}.toml" if config.ranks is None else f"{config.ranks}.json"
    return config.out or Path("stages") / f"{config.model}-{number}".replace("_", "-")


def profile_beside(plan: Path) -> Path:
    """Return the file of the measured costs that lies beside a plan file."""
    return plan.with_suffix(".profile.json")


def _run_plan_ways(config: PlanConfig, ranks: int, arguments: Sequence[str]) -> int:
    """Run the command `vigpipe plan --ranks m`, and return the exit code."""
    _check_ways(config, ranks)
    check_cluster(config)
    if config.profile is not None:
        read_measured(config.profile)
    check_new_file(plan_file(config), "--out ", (".json",), mark=WAYS_MARK, overwrite=None)
    num_ranks = ranks_to_measure(config, ranks)
    together: dict[str, Any] = {"dp" if config.sampler in OF_LAYERS else "shards": num_ranks}
    meeting = replace(config, stages=1, microbatches=1, schedule="gpipe", out=None, **together)
    work = "vigpipe.commands.plan_ways:propose_way"
    return run_on_ranks(meeting, arguments, work, options={"config": config})


def _check_ways(config: PlanConfig, ranks: int) -> None:
    """Raise InputError for options that do not go with --ranks."""
    to_use = f"--ranks {ranks}"
    if ranks < 2:
        raise InputError(f"{to_use}: must be at least 2, so that there are ways to choose from")
    if MODEL_DEFAULTS[config.model].job != "graph":
        raise InputError(
            f"{to_use}: compares ways to train on one graph, and {config.model} is a model of "
            "images; give --stages and --dp instead, or another --model"
        )
    for name, value in given(config, (*CHOSEN, *UNUSED), PlanConfig).items():
        why = "all ways to use the ranks are compared"
        if name in UNUSED:
            why = "costs are those of plain steps, and the choice is always explained"
        raise InputError(f"{as_given(name, value)}: with {to_use} {why}; leave one of them out")
