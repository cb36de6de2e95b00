"""The command `vigpipe time`: time a few steps and test batches, down to the parts of blocks."""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from vigpipe.analysis.run_timing import (
    describe,
    gather_timing,
    make_recorder,
    where_the_rest_is,
    write_timing,
)
from vigpipe.config.files import as_toml
from vigpipe.job.score import Scores
from vigpipe.launch.device import synchronize
from vigpipe.messages import plural
from vigpipe.run.batches import batches
from vigpipe.run.evaluation import evaluate
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.run.record import RunRecord, step_row
from vigpipe.run.step import complete_step, train_step
from vigpipe.run.summary import gather_compression, gather_sent, summarize
from vigpipe.timing.clock import read_clocks

_FEWEST = 8  # timed and untimed steps whose medians can be compared


def time_steps(
    run: Run, rank: int, device: torch.device, folder: Path, num_test_batches: int
) -> None:
    """Time the steps of a run as one of its ranks.

    Every other step runs untimed, to show what timing costs; full and partial batches are counted
    apart for that. Partial batches after the warm-up are taken in addition to the run's steps.
    """
    started, run = time.perf_counter(), _with_full_batches(run)
    recorder = make_recorder(run, rank, device)
    assert recorder is not None
    rank_state = make_rank_state(run, rank, device, recorder)
    record = RunRecord(folder, as_toml(run.config)) if rank_state.is_writer else None
    # Of timed and untimed steps, with full batches and with partial ones.
    seconds: dict[bool, tuple[list[float], list[float]]] = {True: ([], []), False: ([], [])}
    loss = None
    clocks = read_clocks()
    for number, batch in enumerate(batches(rank_state)):
        item = batch.step * run.layout.num_replicas
        fill = run.fill(item)
        timed, untimed = seconds[fill.is_full]
        is_warmup = number < recorder.num_warmup
        is_timed = is_warmup or len(timed) == len(untimed)
        start = time.perf_counter()
        if is_timed:
            with rank_state.timed("train", rank_state.step + 1, fill):
                step = train_step(rank_state, batch)
        else:
            step = train_step(rank_state, batch)
        complete_step(rank_state)
        synchronize(device)
        loss, step_seconds = step.loss, time.perf_counter() - start
        if not is_warmup:
            (timed if is_timed else untimed).append(step_seconds)
        if record is not None and loss is not None:
            waited = step.agreement.data_seconds
            facts = rank_state.step, run.course.epoch(batch.step), loss, step.lr
            rates = run.job.rates(run.layout, item, batch.num_samples, step_seconds)
            record.add_step(step_row(*facts, step_seconds, rates, waited))
    scores = evaluate(rank_state, ("test",), num_test_batches * run.batch_size)
    rank_state.feed.close()
    timing = gather_timing(rank_state, clocks)
    compression, sent = gather_compression(rank_state), gather_sent(rank_state)
    if record is None or timing is None or scores is None:
        return
    of_full = seconds[True] if any(seconds[True]) else seconds[False]
    medians = {
        name: median(of_kind[: recorder.num_steps])
        for name, of_kind in zip(("timed", "untimed"), of_full, strict=True)
        if of_kind  # a single step after the warm-up is timed, and none untimed
    }
    of_test = Scores(scores["test"], None)
    summary = summarize(rank_state, of_test, loss, started, compression=compression, sent=sent)
    summary["timing"] = {**timing.summary(), "median_seconds": medians}
    record.finish(summary)
    write_timing(timing, run, folder, device)
    print(f"{run.config.model} on {run.job.name}: {run.layout}, {device}\n\n{describe(timing)}\n")
    if len(of_full[1]) < _FEWEST:
        print(f"Too few steps to see what timing costs ({plural(len(of_full[0]), 'timed step')}).")
    else:
        timed, untimed = medians["timed"], medians["untimed"]
        print(
            f"Every other step ran untimed: {1e3 * untimed:.3f} ms (median), timed "
            f"{1e3 * timed:.3f} ms: {timed / untimed - 1:+.2%}."
        )
    print(where_the_rest_is(folder, run.config.trace))


def _with_full_batches(run: Run) -> Run:
    """Add steps to a run until those with partial batches take none of its timed steps away."""
    wanted, warmup = run.config.steps, run.config.timing_warmup
    if wanted is None or not run.fill(0).is_full:  # the first batch of an epoch is the fullest
        return run
    num_steps, num_full = warmup, 0
    while num_full < wanted - warmup:
        num_full += run.fill(num_steps * run.layout.num_replicas).is_full
        num_steps += 1
    return replace(run, config=replace(run.config, steps=max(wanted, num_steps)))
