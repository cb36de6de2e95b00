"""How much faster are the stages of a pipeline than the same micro-batches on one stage?"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

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

    One rank runs the unsplit model, with as many threads as every stage has; the others wait. Then
    every rank runs it by itself, all at once: what they lose against the one alone is the machine's
    doing (shared caches, memory, a core's two hardware threads), and no pipeline can win it back.
    """
    layout = job.layout
    if layout.world_size == 1:
        raise InputError("bench pipeline compares with one stage; choose --stages 2 or more")
    worker = make_worker(job, rank, device)
    sequential = make_worker(job.unsplit(), 0, device)
    one, crowd, several = (
        "one stage",
        "one stage on every rank at once",
        f"{layout.num_stages} stages",
    )
    contenders = {
        one: step_of(sequential if worker.is_writer else None),
        crowd: step_of(sequential),
        several: step_of(worker),
    }
    timings = alternate(contenders, one, num_repeats, device)
    if not worker.is_writer:
        return
    stages, pieces = layout.num_stages, layout.num_microbatches
    ceiling = layout.num_replicas * stages * pieces / (pieces + stages - 1)
    cores = layout.world_size * median(timings.ratios(crowd))
    question = (
        f"{job.config.model} on {job.source.name} images, {job.batch_size} a step, {layout}, "
        f"{job.config.dtype}, against the same micro-batches on one stage. With equal stages, no "
        f"transfer and {layout.world_size} full cores the ratio would be {ceiling:.2f}×. While "
        f"every rank is busy, {layout.world_size} ranks together work like {cores:.2f} of one "
        f"alone on this machine: {ceiling * cores / layout.world_size:.2f}× is the most "
        "that it can give."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Pipeline against one stage", question, timings, device)


def step_of(worker: Worker | None) -> Callable[[], object]:
    """A training step on the first batch of a run, read before; nothing for no worker."""
    if worker is None:
        return lambda: None
    _, batch, _ = next(iter(batches(worker)))
    return lambda: train_step(worker, batch)
