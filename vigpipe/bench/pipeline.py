"""How much faster are the stages of a pipeline than the same micro-batches on one stage?"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from vigpipe.bench.side_by_side import alternate, write_results
from vigpipe.errors import InputError
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import train_step


def bench_pipeline(
    run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Time a step of the layout against a step of the unsplit model on the same micro-batches.

    One rank runs the unsplit model, with as many threads as every stage has, while the others wait.
    Then every rank runs it by itself, all at the same time. What they lose compared with the lone
    rank is due to the machine (shared caches, memory, two hardware threads on a core), and no
    pipeline can gain it back.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.

    Raises:
        InputError: the layout has a single rank.
    """
    layout = run.layout
    if layout.world_size == 1:
        raise InputError("bench pipeline compares with one stage; choose --stages 2 or more")
    rank_state = make_rank_state(run, rank, device)
    sequential = make_rank_state(run.unsplit(), 0, device)
    alone, all_at_once, pipelined = (
        "one stage",
        "one stage on every rank at once",
        f"{layout.pipeline_size} stages",
    )
    contenders = {
        alone: step_of(sequential if rank_state.is_writer else None),
        all_at_once: step_of(sequential),
        pipelined: step_of(rank_state),
    }
    timings = alternate(contenders, alone, num_repeats, device)
    if not rank_state.is_writer:
        return
    stages, num_microbatches = layout.pipeline_size, layout.num_microbatches
    waves = num_microbatches + stages - 1
    ceiling = layout.num_replicas * stages * num_microbatches / waves
    cores = layout.world_size * median(timings.ratios(all_at_once))
    question = (
        f"{run.config.model} on {run.job.name}, {run.job.describe_step(layout)} a step, {layout}, "
        f"{run.config.dtype}, against the same micro-batches on one stage. With equal stages, no "
        f"transfer and {layout.world_size} full cores the ratio would be {ceiling:.2f}×. While "
        f"every rank is busy, {layout.world_size} ranks together work like {cores:.2f} of one "
        f"alone on this machine: {ceiling * cores / layout.world_size:.2f}× is the most "
        "that it can give."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Pipeline against one stage", question, timings, device)


def step_of(rank_state: RankState | None) -> Callable[[], object]:
    """Make a training step on the first batch of a run, which is read here.

    Without a rank state the step does nothing.
    """
    if rank_state is None:
        return lambda: None
    batch = next(batches(rank_state))
    return lambda: train_step(rank_state, batch)
