"""How much does a checkpoint slow down the steps during which it is written?"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.side_by_side import alternate, write_results
from vigpipe.checkpoint.checkpoints import Checkpoints
from vigpipe.checkpoint.state import named_tensors
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import train_step

NUM_STEPS = 5  # optimizer steps that each contender does


def bench_checkpoint(
    run: Run, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Time some steps alone, and the same steps with a checkpoint that is begun before them.

    Args:
        run: the run with the layout, model and data to time.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the results.
        num_repeats: timed repeats of every contender.
    """
    rank_state = make_rank_state(run, rank, device)
    problems: list[str] = []
    checkpoints = Checkpoints(rank_state, folder, problems.append)
    batch = next(batches(rank_state))
    alone, saving = f"{NUM_STEPS} steps", f"{NUM_STEPS} steps and a checkpoint"
    contenders = {
        alone: partial(_steps, rank_state, batch, lambda: None),
        saving: partial(_steps, rank_state, batch, partial(checkpoints.save, None, True)),
    }
    timings = alternate(contenders, alone, num_repeats, device)
    checkpoints.saver.finish()
    if problems:
        raise RuntimeError(problems[0])
    if not rank_state.is_writer:
        return
    size = sum(tensor.nbytes for tensor in named_tensors(rank_state).values())
    question = (
        f"{run.config.model} on {run.job.name} images, {run.batch_size} a step, {run.layout}, "
        f"{run.config.dtype}: {NUM_STEPS} steps, and {NUM_STEPS} with a checkpoint that is copied "
        f"before the first of them and written, hashed and synced beside them ({size / 1e6:.0f} "
        "MB on the last rank). A checkpoint every 50 steps costs a tenth of the difference."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Steps with and without a checkpoint", question, timings, device)


def _steps(rank_state: RankState, batch: ReplicaBatch, before: Callable[[], None]) -> None:
    before()
    for _ in range(NUM_STEPS):
        train_step(rank_state, batch)
