"""Whether the weights of a run fit into the memory of the host, before anything is made of them."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.run.facts import Run

# Numbers that an optimizer keeps of each weight.
KEPT = {"adam": 2, "adamw": 2, "nadamw": 2, "sgd": 1, "rmsprop": 2, "lion": 1}
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_room(run: Run, ranks_here: int) -> None:
    """Check that what ranks keep of the weights fits into the memory of this host.

    That is the weights, their gradients and the optimizer's state, and the wide model of
    sub-networks where each replica puts it together; what passes through the layers comes on top.

    Args:
        run: the facts of the run.
        ranks_here: number of ranks on this host.

    Raises:
        InputError: it does not.
    """
    config, layout = run.config, run.layout
    assert config.opt is not None
    model, num_parts = run.wide_model, run.num_subnetworks
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    num_kept = 0
    if run.has_subnetworks:
        num_kept += _num_weights(shapes) if run.job.merges_whole else 0
        slicing = run.job.slicing(model)
        shapes = {name: slicing.shape(name, shape, num_parts) for name, shape in shapes.items()}
    num_kept += _num_weights(shapes) * (2 + KEPT[config.opt])
    needed = num_kept * run.dtype.itemsize * ranks_here // layout.pipeline_size
    room = memory_bytes()
    if needed > room:
        advice = "take a smaller model, or share it among hosts with --stages"
        if num_parts == 1:
            advice += ", or among sub-networks with --strategy subnetworks --dp 8"
        elif run.has_subnetworks:
            advice += ", or among more sub-networks with a larger --dp"
        ranks = "one rank" if ranks_here == 1 else f"{ranks_here} ranks"
        raise InputError(
            f"--model {config.model}: {ranks} on this host would keep "
            f"{needed / 1e9:,.1f} GB of weights, gradients and state of {config.opt}, and it has "
            f"{room / 1e9:,.1f} GB of memory; {advice}"
        )


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
