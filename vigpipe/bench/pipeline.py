"""How much faster are the stages of a pipeline than the same micro-batches on one stage?"""

from collections.abc import Callable
from pathlib import Path

import torch

from vigpipe.bench.measure import alternate, write_results
from vigpipe.errors import InputError
from vigpipe.job import Job
from vigpipe.train import batches
from vigpipe.worker import Worker, make_worker, train_step


def bench_pipeline(
    job: Job, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Time a step of the layout against a step of the unsplit model on the same micro-batches.

    One rank runs the unsplit model, with as many threads as every stage has; the others wait.
    """
    layout = job.layout
    if layout.world_size == 1:
        raise InputError("bench pipeline compares with one stage; choose --stages 2 or more")
    worker = make_worker(job, rank, device)
    sequential = make_worker(job.unsplit(), 0, device) if worker.is_writer else None
    names = ("one stage", f"{layout.num_stages} stages")
    timings = alternate(
        {names[0]: step_of(sequential), names[1]: step_of(worker)}, names[0], num_repeats, device
    )
    if sequential is None:
        return
    stages, pieces = layout.num_stages, layout.num_microbatches
    ceiling = layout.num_replicas * stages * pieces / (pieces + stages - 1)
    question = (
        f"{job.config.model} on {job.source.name} images, {job.batch_size} a step, {layout}, "
        f"{job.config.dtype}, against the same micro-batches on one stage. With equal stages and "
        f"no transfer the ratio would be {ceiling:.2f}×."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Pipeline against one stage", question, timings, device)


def step_of(worker: Worker | None) -> Callable[[], object]:
    """A training step on the first batch of a run, read before; nothing for no worker."""
    if worker is None:
        return lambda: None
    _, batch, _ = next(iter(batches(worker)))
    return lambda: train_step(worker, batch)
