"""Compare ways to add up gradients: DDP, after the pipeline has drained, or so in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.side_by_side import alternate, write_results
from vigpipe.config.choices import Sync
from vigpipe.errors import InputError
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.selftest.way import step_of

SYNCS: tuple[Sync, ...] = ("ddp", "drain", "double")


def bench_sync(run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int) -> None:
    """Time a step of the layout with each way to add up gradients over the replicas.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.

    Raises:
        InputError: the layout has a single replica.
    """
    if run.layout.num_replicas == 1:
        raise InputError("sync: adds gradients up over replicas; choose --dp 2 or more")
    rank_states = [
        make_rank_state(replace(run, config=replace(run.config, sync=sync)), rank, device)
        for sync in SYNCS
    ]
    contenders = dict[str, Any](zip(SYNCS, map(step_of, rank_states), strict=True))
    timings = alternate(contenders, "ddp", num_repeats, device)
    if not rank_states[0].is_writer:
        return
    question = (
        f"{run.config.model} on {run.job.name} images, {run.batch_size} a step, {run.layout}, "
        f"{run.config.dtype}: --sync ddp, drain and double."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Adding gradients up over replicas", question, timings, device)
