"""What does a checkpoint cost the steps beside which it is written?"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path

import torch

from vigpipe.bench.measure import alternate, write_results
from vigpipe.checkpoint.saver import Saver
from vigpipe.checkpoint.state import share_of, state_of
from vigpipe.data.shards import ReplicaBatch
from vigpipe.job import Job
from vigpipe.train import batches, make_saver, manifest_of
from vigpipe.worker import Worker, make_worker, train_step

NUM_STEPS = 5  # from checkpoint to checkpoint


def bench_checkpoint(
    job: Job, rank: int, device: torch.device, folder: Path, num_repeats: int
) -> None:
    """Time some steps alone, and the same with a checkpoint that is begun before them."""
    worker = make_worker(job, rank, device)
    told: list[str] = []
    saver = make_saver(worker, folder, told.append)
    batch: list[ReplicaBatch] = [batch for _, batch, _ in islice(batches(worker), 1)]
    alone, saving = f"{NUM_STEPS} steps", f"{NUM_STEPS} steps and a checkpoint"
    contenders = {
        alone: partial(_steps, worker, batch[0], lambda: None),
        saving: partial(_steps, worker, batch[0], _save_of(worker, saver)),
    }
    timings = alternate(contenders, alone, num_repeats, device)
    saver.finish()
    if told:
        raise RuntimeError(told[0])
    if not worker.is_writer:
        return
    size = sum(tensor.nbytes for tensor in state_of(worker).values())
    question = (
        f"{job.config.model} on {job.source.name} images, {job.batch_size} a step, {job.layout}, "
        f"{job.config.dtype}: {NUM_STEPS} steps, and {NUM_STEPS} with a checkpoint that is copied "
        f"before the first of them and written, hashed and synced beside them ({size / 1e6:.0f} "
        "MB on the last rank). A checkpoint every 50 steps costs a tenth of the difference."
    )
    print(f"{question}\n\n{timings.table()}\n")
    write_results(folder, "Steps with and without a checkpoint", question, timings, device)


def _steps(worker: Worker, batch: ReplicaBatch, before: Callable[[], None]) -> None:
    before()
    for _ in range(NUM_STEPS):
        train_step(worker, batch)


def _save_of(worker: Worker, saver: Saver) -> Callable[[], None]:
    numbers = count(1)
    layout = worker.job.layout

    def save() -> None:
        manifest = replace(manifest_of(worker, None, True), step=next(numbers))
        saver.save(manifest, share_of(state_of(worker), worker.replica_index, layout.num_replicas))

    return save
