"""A training run from top to bottom: ranks, mesh, data, model, split, loop, record.

One batch's way: `data.shards.replica_batches` reads a replica's share of a step,
`worker.train_step` runs it through `parallel.schedule.Pipeline`, adds gradients up over the
replicas and steps the optimizer, `timing.record` keeps the row.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vigpipe.checkpoint import gather_named, save_weights
from vigpipe.config import MODEL_DEFAULTS, as_toml
from vigpipe.data.shards import ReplicaBatch, epoch_order, repeated, replica_batches
from vigpipe.device import hardware, has_own_memory, peak_bytes, synchronize
from vigpipe.evaluate import Score, evaluate
from vigpipe.job import Job
from vigpipe.timed import describe, gather_timing, make_recorder, write_timing
from vigpipe.timing.record import RunRecord, provenance
from vigpipe.worker import Worker, make_worker, train_step


def train(job: Job, rank: int, device: torch.device, folder: Path) -> None:
    """Train as one rank; the one that knows the loss writes the run's files to `folder`."""
    started = time.perf_counter()
    worker = make_worker(job, rank, device, make_recorder(job, rank, device))
    record = RunRecord(folder, as_toml(job.config)) if worker.is_writer else None
    console = Console(quiet=record is None, soft_wrap=True, highlight=False)
    console.print(f"{job.config.model} on {job.source.name}: {job.layout}, {device}, {folder}")
    for note in job.notes:
        console.print(note)

    score: Score | None = None
    average: Score | None = None
    loss: float | None = None
    closes = nullcontext() if record is None else closing(record)
    with closes, _progress(console) as progress:
        bar = progress.add_task("", total=job.num_steps)
        for epoch, batch, evaluates in batches(worker):
            lr, step_started = worker.lr, time.perf_counter()
            with worker.timed("train", worker.step + 1):
                loss = train_step(worker, batch)
            synchronize(device)
            seconds = time.perf_counter() - step_started
            if loss is not None and not math.isfinite(loss):
                raise FloatingPointError(
                    f"step {worker.step}: the loss is {loss}; lower --lr, or bound the gradient "
                    "with --clip 1"
                )
            if record is not None and loss is not None:
                record.add_step(worker.step, epoch, loss, lr, seconds, batch.num_samples)
                progress.update(bar, advance=1, description=f"epoch {epoch}, loss {loss:.4f}")
            if evaluates:
                score = evaluate(worker)
                if worker.ema is not None:
                    with worker.averaged():
                        average = evaluate(worker)
                if record is not None and score is not None:
                    _tell(record, console, epoch, score, average)

    worker.reader.close()
    timing = gather_timing(worker) if worker.recorder is not None else None
    _save(worker, folder / "model.safetensors")
    if worker.ema is not None:
        with worker.averaged():
            _save(worker, folder / "model-ema.safetensors")
    if record is None or score is None:
        return
    record.finish(
        {
            "model": job.config.model,
            "data": job.source.name,
            "loss": loss,
            "test": asdict(score),
            **_average(average),
            **facts(worker, started),
            **({"timing": timing.summary()} if timing is not None else {}),
        }
    )
    if timing is not None:
        write_timing(timing, job, folder, device)
        console.print(describe(timing), markup=False)
    console.print(f"weights and metrics in {folder}")


def facts(worker: Worker, started: float) -> dict[str, Any]:
    """What a run was, for summary.json; `started` is when, by time.perf_counter."""
    job, layout = worker.job, worker.job.layout
    return {
        "steps": worker.step,
        "skipped_images": job.source.num_bad_images,
        "layout": {
            "stages": [list(blocks) for blocks in job.plan.stages],
            "ranks": layout.world_size,
            "microbatches": layout.num_microbatches,
            "replicas": layout.num_replicas,
            "schedule": layout.schedule,
        },
        "threads_per_rank": torch.get_num_threads(),
        "hardware": hardware(worker.device),
        "peak_bytes": peak_bytes(worker.device),
        "wall_seconds": time.perf_counter() - started,
        **provenance(),
    }


def batches(worker: Worker) -> Iterator[tuple[int, ReplicaBatch, bool]]:
    """This rank's share of every step, with its epoch and whether an evaluation follows."""
    job = worker.job
    step, epoch = 0, 0
    while step < job.num_steps:
        epoch += 1
        order, copies = epoch_order(job.config.seed, epoch, len(job.source.train)), None
        if (job.config.repeated_augment or 1) > 1:
            order, copies = repeated(order, job.batch_size, job.config.repeated_augment or 1)
        order = order[: (job.num_steps - step) * job.batch_size]
        batches = replica_batches(
            job.source.train,
            order,
            job.cut(worker.replica_index),
            copies=copies,
            mix=worker.mix,
            reader=worker.reader,
            seed=job.config.seed,
            first_step=step,
            epoch=epoch,
            with_images=worker.pipeline.has_first,
            with_labels=worker.pipeline.has_last,
            dtype=job.dtype,
            pin=has_own_memory(worker.device),
        )
        seen = 0
        for batch in batches:
            step, seen = step + 1, seen + batch.num_samples
            due = epoch % job.config.evaluate_every == 0 or step == job.num_steps
            yield epoch, batch, seen == len(order) and due


def _tell(
    record: RunRecord, console: Console, epoch: int, score: Score, average: Score | None
) -> None:
    row: dict[str, Any] = {"epoch": epoch, **asdict(score), **_average(average)}
    record.add(**row)
    console.print(
        f"epoch {epoch}: test loss {score.loss:.4f}, top-1 {score.top1:.2%}, "
        f"top-5 {score.top5:.2%} of {score.images} images"
        + (f"; moving average: top-1 {average.top1:.2%}" if average else "")
    )


def _average(score: Score | None) -> dict[str, Any]:
    if score is None:
        return {}
    return {"ema": {"loss": score.loss, "top1": score.top1, "top5": score.top5}}


def _save(worker: Worker, path: Path) -> None:
    """Write the weights of all stages, with what is needed to use them."""
    job = worker.job
    state = gather_named(worker.state(), worker.stage_group, job.layout.num_stages - 1)
    if state is None or not worker.is_writer:
        return
    config, source, pixels = job.config, job.source, MODEL_DEFAULTS[job.config.model]
    height, width = source.image_size
    facts = {
        "model": config.model,
        "num_classes": source.num_classes,
        "in_chans": source.channels,
        "img_size": f"{height}x{width}",
        "mean": pixels.image_mean,
        "std": pixels.image_std,
        "crop_pct": config.crop_pct,
        "class_names": json.dumps(source.class_names, ensure_ascii=False),
        "norm": config.norm,
        "graph": config.graph,
        "aggregator": config.aggregator,
        "stem_stride": config.stem_stride,
        "compat": config.compat,
    }
    save_weights(path, state, {k: str(v) for k, v in facts.items() if v is not None})


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


if __name__ == "__main__":
    from vigpipe.cli import main

    sys.argv.insert(1, "train")  # for the records too, which tell the command
    sys.exit(main())
