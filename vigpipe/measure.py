"""`vigpipe time`: a few steps and test batches of a run, timed down to the parts of its blocks."""

import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from vigpipe.config import as_toml
from vigpipe.device import synchronize
from vigpipe.evaluate import evaluate
from vigpipe.job import Job
from vigpipe.timed import describe, gather_timing, make_recorder, write_timing
from vigpipe.timing.record import RunRecord
from vigpipe.train import batches, facts
from vigpipe.worker import make_worker, train_step


def time_steps(
    job: Job, rank: int, device: torch.device, folder: Path, num_test_batches: int
) -> None:
    """Time steps as one rank; every other step runs untimed, to show what timing costs.

    Args:
        job: the run; its steps are those that are timed.
        rank: position in the world.
        device: of this rank.
        folder: of the run's files.
        num_test_batches: batches of the evaluation; the warm-up is among them.
    """
    started = time.perf_counter()
    recorder = make_recorder(job, rank, device)
    assert recorder is not None
    worker = make_worker(job, rank, device, recorder)
    record = RunRecord(folder, as_toml(job.config)) if worker.is_writer else None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    loss = None
    for number, (epoch, batch, _) in enumerate(batches(worker)):
        since = number - recorder.num_warmup
        is_timed = since < 0 or since % 2 == 0
        lr, start = worker.lr, time.perf_counter()
        if is_timed:
            with worker.timed("train", worker.step + 1):
                loss = train_step(worker, batch)
        else:
            loss = train_step(worker, batch)
        synchronize(device)
        taken = time.perf_counter() - start
        if 0 <= since < 2 * recorder.num_steps:
            seconds[is_timed].append(taken)
        if record is not None and loss is not None:
            record.add_step(worker.step, epoch, loss, lr, taken, batch.num_samples)
    score = evaluate(worker, num_test_batches * job.batch_size)
    worker.reader.close()
    timing = gather_timing(worker)
    if record is None or timing is None or score is None:
        return
    medians = {
        name: median(seconds[is_timed])
        for name, is_timed in (("timed", True), ("untimed", False))
        if seconds[is_timed]  # a single step after the warm-up is timed
    }
    record.finish(
        {
            "model": job.config.model,
            "data": job.source.name,
            "loss": loss,
            "test": asdict(score),
            **facts(worker, started),
            "timing": {**timing.summary(), "median_seconds": medians},
        }
    )
    write_timing(timing, job, folder, device)
    print(
        f"{job.config.model} on {job.source.name}: {job.layout}, {device}\n\n{describe(timing)}\n"
    )
    if len(medians) == 2:
        timed, untimed = medians["timed"], medians["untimed"]
        print(
            f"Every other step ran untimed: {1e3 * untimed:.3f} ms (median), timed "
            f"{1e3 * timed:.3f} ms: {timed / untimed - 1:+.2%}."
        )
    print(folder)
