"""A training run from top to bottom: ranks, mesh, data, model, split, loop, record.

One batch's way: `data.shards.replica_batches` reads a replica's share of a step,
`worker.train_step` runs it through `parallel.schedule.Pipeline`, adds gradients up over the
replicas, asks all ranks whether every number is finite, and steps the optimizer;
`timing.record` keeps the row, and `checkpoint.saver` now and then the state.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vigpipe.checkpoint.manifest import Manifest
from vigpipe.checkpoint.rescue import rescue
from vigpipe.checkpoint.resume import resume
from vigpipe.checkpoint.saver import Saver, shard_name
from vigpipe.checkpoint.state import share_of, state_of
from vigpipe.checkpoint.weights import gather_named, save_weights
from vigpipe.config import MODEL_DEFAULTS, as_toml
from vigpipe.data.shards import ReplicaBatch, epoch_order, repeated, replica_batches
from vigpipe.device import hardware, has_own_memory, peak_bytes, synchronize
from vigpipe.errors import DONE, SAVED, InputError
from vigpipe.evaluate import Score, evaluate
from vigpipe.job import Job
from vigpipe.parallel.exchange import Status, everyone, from_rank_0, patiently
from vigpipe.parallel.failure import is_lost_peer
from vigpipe.straggler import Stragglers
from vigpipe.timed import describe, gather_timing, make_recorder, write_timing
from vigpipe.timing.record import RunRecord, provenance
from vigpipe.when import Clockwork, parse_every, parse_stop_before
from vigpipe.worker import Worker, find_anomaly, make_worker, train_step

MOST_SKIPPED = 10  # steps in a row: then skipping does not help


class Scores(NamedTuple):
    """What an evaluation found, of the weights and of their moving average; None where not asked.

    Ranks without the last stage know neither.
    """

    test: Score | None
    average: Score | None


def train(job: Job, rank: int, device: torch.device, folder: Path) -> int:
    """Train as one rank; the one that knows the loss writes the run's files to `folder`.

    Returns:
        SAVED if the run was asked to stop and has left a checkpoint, else DONE.
    """
    started, config = time.perf_counter(), job.config
    stop_at = parse_stop_before(config.stop_before, os.environ)
    clockwork = Clockwork(parse_every(config.checkpoint_every), job.num_steps, stop_at)
    worker = make_worker(job, rank, device, make_recorder(job, rank, device))
    console = Console(quiet=not worker.is_writer, soft_wrap=True, highlight=False)
    console.print(f"{config.model} on {job.source.name}: {job.layout}, {device}, {folder}")
    tell = partial(console.print, markup=False)
    for note in job.notes:
        tell(note)
    before = resume(worker, folder, tell)
    record = RunRecord(folder, as_toml(config), worker.step, tell) if worker.is_writer else None
    saver = make_saver(worker, folder, tell)
    stragglers = Stragglers(job.layout)

    scores: Scores | None = None
    loss: float | None = None
    num_skipped = 0  # steps in a row
    is_evaluated = before is None or before.evaluated

    def lost_peer() -> None:
        """Save what the peer that is gone had, too: the replicas are equal."""
        manifest = manifest_of(worker, loss, evaluated=is_evaluated)
        rescue(saver.folder, saver.token, saver.own, manifest, state_of(worker))

    closes = nullcontext() if record is None else closing(record)
    with closes, clockwork, _rescuing(worker, lost_peer), _progress(console) as progress:
        bar = progress.add_task("", total=job.num_steps, completed=worker.step)
        if before is not None:
            loss = before.loss
            _note(record, "resumed", worker.step, f"from a checkpoint of {before.layout['text']}")
            if not before.evaluated:
                scores, is_evaluated = _evaluate(worker, record, tell), True
        for epoch, batch, evaluates in batches(worker):
            worker.status = Status(
                stop=clockwork.is_stop_due(),
                save=worker.is_writer and clockwork.is_save_due(worker.step + 1),
            )
            lr, step_started = worker.lr, time.perf_counter()
            with worker.timed("train", worker.step + 1):
                loss = train_step(worker, batch)
            synchronize(device)
            seconds, agreed = time.perf_counter() - step_started, worker.agreement
            num_skipped = 0 if agreed.finite else num_skipped + 1
            if num_skipped:
                message = _not_finite(worker, batch, num_skipped)
                loss = None
                tell(_note(record, "skipped", worker.step, message))
            elif record is not None and loss is not None:
                record.add_step(worker.step, epoch, loss, lr, seconds, batch.num_samples)
                progress.update(
                    bar, completed=worker.step, description=f"epoch {epoch}, loss {loss:.4f}"
                )
            for straggler in stragglers.add(agreed.busy_seconds):
                tell(_note(record, "straggler", worker.step, str(straggler)))
            is_evaluated = not evaluates
            if evaluates and not agreed.stop:
                scores, is_evaluated = _evaluate(worker, record, tell), True
            if agreed.save or agreed.stop:
                if record is not None:
                    record.sync()
                patiently(saver.finish, job.layout.world_size)  # the one before, on a slow disk
                saver.save(
                    manifest_of(worker, loss, is_evaluated),
                    share_of(state_of(worker), worker.replica_index, job.layout.num_replicas),
                )
                clockwork.saved()
            if agreed.stop:
                return _stop(worker, saver, clockwork, tell)

    if scores is None:  # the checkpoint was of the last step
        scores = _evaluate(worker, None, tell)
    worker.reader.close()
    timing = gather_timing(worker) if worker.recorder is not None else None
    _save(worker, folder / "model.safetensors")
    if worker.ema is not None:
        with worker.averaged():
            _save(worker, folder / "model-ema.safetensors")
    saver.finish()
    if record is None or scores.test is None:
        return DONE
    record.finish(
        {
            "model": config.model,
            "data": job.source.name,
            "loss": loss,
            "test": asdict(scores.test),
            **_average(scores.average),
            **facts(worker, started),
            **({"resumed_at_step": before.step} if before is not None else {}),
            **({"timing": timing.summary()} if timing is not None else {}),
        }
    )
    if timing is not None:
        write_timing(timing, job, folder, device)
        console.print(describe(timing), markup=False)
    console.print(f"weights and metrics in {folder}")
    return DONE


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
    """This rank's share of every step left, with its epoch and whether an evaluation follows.

    What a step reads depends on its number only, so a run goes on exactly where it ended.
    """
    job = worker.job
    step = worker.step
    while step < job.num_steps:
        epoch, skipped = step // job.steps_per_epoch + 1, step % job.steps_per_epoch
        order, copies = epoch_order(job.config.seed, epoch, len(job.source.train)), None
        if (job.config.repeated_augment or 1) > 1:
            order, copies = repeated(order, job.batch_size, job.config.repeated_augment or 1)
        order = order[: (job.num_steps - step + skipped) * job.batch_size]
        done = skipped * job.batch_size  # images of this epoch
        batches = replica_batches(
            job.source.train,
            order[done:],
            job.cut(worker.replica_index),
            copies=None if copies is None else copies[done:],
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
        for batch in batches:
            step, done = step + 1, done + batch.num_samples
            due = epoch % job.config.evaluate_every == 0 or step == job.num_steps
            yield epoch, batch, done == len(order) and due


def make_saver(worker: Worker, folder: Path, tell: Callable[[str], None]) -> Saver:
    """This rank's part in the checkpoints; all ranks call it together."""
    layout = worker.job.layout
    shards = [
        shard_name(stage, replica)
        for replica in range(layout.num_replicas)
        for stage in range(layout.num_stages)
    ]
    return Saver(
        folder,
        shards,
        shard_name(worker.stage_index, worker.replica_index),
        is_writer=worker.is_writer,
        keep=worker.job.config.keep,
        token=from_rank_0(secrets.token_hex(4), layout.world_size),
        tell=tell,
    )


def manifest_of(worker: Worker, loss: float | None, evaluated: bool) -> Manifest:
    """What a checkpoint of now is of."""
    job, layout = worker.job, worker.job.layout
    return Manifest(
        step=worker.step,
        num_steps=job.num_steps,
        evaluated=evaluated,
        loss=loss,
        config=as_toml(job.config),
        data=job.fingerprint,
        layout={
            "text": str(layout),
            "stages": [list(blocks) for blocks in job.plan.stages],
            "num_stages": layout.num_stages,
            "pieces": layout.num_microbatches * layout.num_replicas,
        },
        weights=weights_metadata(job),
        versions=provenance(),
    )


def _evaluate(worker: Worker, record: RunRecord | None, tell: Callable[[str], None]) -> Scores:
    """Score the weights, and their moving average if there is one."""
    score, average = evaluate(worker), None
    if worker.ema is not None:
        with worker.averaged():
            average = evaluate(worker)
    if record is not None and score is not None:
        epoch = -(-worker.step // worker.job.steps_per_epoch)
        record.add(epoch=epoch, **asdict(score), **_average(average))
        tell(
            f"epoch {epoch}: test loss {score.loss:.4f}, top-1 {score.top1:.2%}, "
            f"top-5 {score.top5:.2%} of {score.images} images"
            + (f"; moving average: top-1 {average.top1:.2%}" if average else "")
        )
    return Scores(score, average)


def _not_finite(worker: Worker, batch: ReplicaBatch, num_skipped: int) -> str:
    """What was wrong with a step that no rank has taken part in.

    Raises:
        FloatingPointError: the run is to stop at such a step, or skipping does not help.
    """
    where = find_anomaly(worker, batch)
    why = f"step {worker.step}: the loss or a gradient is NaN or infinite; {where}"
    if worker.job.config.on_nan == "stop":
        raise FloatingPointError(
            f"{why}; lower --lr, bound the gradient with --clip 1, or leave such steps out with "
            "--on-nan skip"
        )
    if num_skipped == MOST_SKIPPED:
        raise FloatingPointError(
            f"{why}; {num_skipped} steps in a row were skipped, which does not help; lower --lr, "
            "or bound the gradient with --clip 1"
        )
    return f"{why}; skipped"


def _note(record: RunRecord | None, event: str, step: int, message: str) -> str:
    if record is not None:
        record.add_event(event, step, message)
    return message


@contextmanager
def _rescuing(worker: Worker, lost_peer: Callable[[], None]) -> Iterator[None]:
    """Call lost_peer when a collective fails for want of one and replicas can make up for it."""
    try:
        yield
    except RuntimeError as error:
        if worker.job.layout.num_replicas > 1 and is_lost_peer(error):
            lost_peer()
        raise


def _stop(worker: Worker, saver: Saver, clockwork: Clockwork, tell: Callable[[str], None]) -> int:
    """Wait for the checkpoint and leave, all ranks at once: launchers end the others."""
    world_size = worker.job.layout.world_size
    worker.reader.close()
    patiently(saver.finish, world_size)
    whys = [why for why in everyone(clockwork.why, world_size) if why]
    newest = max(everyone(saver.newest or 0, world_size))
    if newest != worker.step:
        raise InputError(
            f"asked to stop ({whys[0]}), but the checkpoint of step {worker.step} could not be "
            f"written to {saver.folder}; make room, and go on from the newest with --resume auto"
        )
    tell(
        f"stopped after step {worker.step} of {worker.job.num_steps} ({whys[0]}) with a checkpoint "
        f"in {saver.folder}; go on with --resume auto"
    )
    return SAVED


def _average(score: Score | None) -> dict[str, Any]:
    if score is None:
        return {}
    return {"ema": {"loss": score.loss, "top1": score.top1, "top5": score.top5}}


def _save(worker: Worker, path: Path) -> None:
    """Write the weights of all stages, with what is needed to use them."""
    job = worker.job
    state = gather_named(worker.state(), worker.stage_group, job.layout.num_stages - 1)
    if state is not None and worker.is_writer:
        save_weights(path, state, weights_metadata(job))


def weights_metadata(job: Job) -> dict[str, str]:
    """What a file of weights says of them."""
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
    return {k: str(v) for k, v in facts.items() if v is not None}


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
