"""Whether the weights of a run fit into the memory of the host, before anything is made of them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from vigpipe.errors import InputError
from vigpipe.run.facts import Run

# How many numbers an optimizer keeps of each weight.
KEPT = {"adam": 2, "adamw": 2, "nadamw": 2, "sgd": 1, "rmsprop": 2, "lion": 1}
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_room(run: Run, ranks_here: int) -> None:
    """Check that what ranks keep of the weights fits into this host's memory; more comes on top."""
    config = run.config
    needed, room = needed_bytes(run, ranks_here), memory_bytes()
    if needed > room:
        advice = "take a smaller model, or share it among hosts with --stages"
        if run.num_subnetworks == 1:
            advice += ", or among sub-networks with --strategy subnetworks --dp 8"
        elif run.has_subnetworks:
            advice += ", or among more sub-networks with a larger --dp"
        name, largest = max(run.wide_model.named_parameters(), key=lambda named: named[1].numel())
        ranks = "one rank" if ranks_here == 1 else f"{ranks_here} ranks"
        raise InputError(
            f"--model {config.model}: {ranks} on this host would keep "
            f"{needed / 1e9:,.1f} GB of weights, gradients, state of {config.opt} and copies for "
            f"checkpoints, and it has {room / 1e9:,.1f} GB of memory; the largest "
            f"weight, {name}, is {'×'.join(map(str, largest.shape))}; {advice}, or see whether "
            "--data is as large as it should be"
        )


def needed_bytes(run: Run, ranks_here: int) -> int:
    """Count the bytes that a host's ranks keep of the weights while a checkpoint is written."""
    config, layout = run.config, run.layout
    assert config.opt is not None
    model, num_wide = run.wide_model, 0
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if run.has_subnetworks:
        num_wide = _num_weights(shapes) if run.job.merges_whole else 0
        slicing, num_parts = run.job.slicing(model), run.num_subnetworks
        shapes = {name: slicing.shape(name, shape, num_parts) for name, shape in shapes.items()}
    optimizer, residual = KEPT[config.opt], _num_left_out(run)
    state = 1 + _num_averages(run)
    num_copies = layout.team_size * layout.num_shards  # They share the writing of one state.
    models_here = ranks_here / layout.pipeline_size
    held = state + residual + _num_in_sums(run)
    if layout.has_server:  # It alone takes steps, and writes.
        numbers = models_here * held + optimizer + (state + optimizer)
    else:
        written = (state + optimizer) / num_copies + residual  # each writes its own residual
        numbers = models_here * (held + optimizer + written)
    num_weights = _num_weights(shapes)
    # The last step writes a checkpoint. Before the first, each rank has made the whole model.
    needed = max(num_weights * numbers + models_here * num_wide, ranks_here * num_weights)
    return math.ceil(needed * run.dtype.itemsize)


def _num_averages(run: Run) -> int:
    """Count the numbers that a rank keeps of each weight for averages of any kind."""
    config = run.config
    num = 1 if config.ema else 0
    num += 2 if config.average == "outer" else 0  # the last average's weights, and their velocity
    is_given = config.overlap and run.layout.num_teams > 1
    return num + (2 if is_given else 0)  # what was given last, and its mean


def _num_left_out(run: Run) -> int:
    """Count the numbers that compression leaves out of each weight for the next sum."""
    config, layout = run.config, run.layout
    num_replicas = layout.team_size if config.strategy == "synchronous" else layout.num_teams
    is_lossy = config.compress != "none" and config.average != "weights"
    return 1 if is_lossy and num_replicas > 1 else 0


def _num_in_sums(run: Run) -> int:
    """Count the numbers, each as large as a weight, that the sum of a weight's gradients takes."""
    layout, sync = run.layout, run.config.sync or "double"
    is_sum = layout.team_size * layout.num_shards > 1 or layout.num_microbatches > 1
    if sync != "double" or not is_sum:
        return 1
    return 2 if run.dtype == torch.float64 else 3  # in twice the precision, and once rounded


def _num_weights(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def memory_bytes() -> int:
    """Return how much memory the processes of this host may take: its own, or that of a cgroup."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _LIMITS):
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
    return min(sizes)
