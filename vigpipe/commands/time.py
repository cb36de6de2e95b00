"""The command `vigpipe time`: time a few steps and test batches, down to the parts of blocks."""

import time
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
from vigpipe.run.batches import batches
from vigpipe.run.evaluation import evaluate
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.run.record import RunRecord, step_row
from vigpipe.run.step import complete_step, train_step
from vigpipe.run.summary import gather_compression, gather_sent, summarize
from vigpipe.timing.clock import read_clocks


def time_steps(
    run: Run, rank: int, device: torch.device, folder: Path, num_test_batches: int
) -> None:
    """Time the steps of a run as one of its ranks.

    Every other step runs untimed, to show what timing costs.

    Args:
        run: the run; its number of steps is that of all steps, timed and untimed.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the run's files.
        num_test_batches: batches of the evaluation, the warm-up included.
    """
    started = time.perf_counter()
    recorder = make_recorder(run, rank, device)
    assert recorder is not None
    rank_state = make_rank_state(run, rank, device, recorder)
    record = RunRecord(folder, as_toml(run.config)) if rank_state.is_writer else None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    loss = None
    clocks = read_clocks()
    for number, batch in enumerate(batches(rank_state)):
        since = number - recorder.num_warmup
        is_timed = since < 0 or since % 2 == 0
        start = time.perf_counter()
        if is_timed:
            with rank_state.timed("train", rank_state.step + 1):
                step = train_step(rank_state, batch)
        else:
            step = train_step(rank_state, batch)
        complete_step(rank_state)
        synchronize(device)
        loss, step_seconds = step.loss, time.perf_counter() - start
        if 0 <= since < 2 * recorder.num_steps:
            seconds[is_timed].append(step_seconds)
        if record is not None and loss is not None:
            waited = step.agreement.data_seconds
            facts = rank_state.step, run.course.epoch(batch.step), loss, step.lr
            item = batch.step * run.layout.num_replicas
            rates = run.job.rates(run.layout, item, batch.num_samples, step_seconds)
            record.add_step(step_row(*facts, step_seconds, rates, waited))
    scores = evaluate(rank_state, ("test",), num_test_batches * run.batch_size)
    rank_state.feed.close()
    timing = gather_timing(rank_state, clocks)
    compression, sent = gather_compression(rank_state), gather_sent(rank_state)
    if record is None or timing is None or scores is None:
        return
    medians = {
        name: median(seconds[is_timed])
        for name, is_timed in (("timed", True), ("untimed", False))
        if seconds[is_timed]  # a single step after the warm-up is timed, and none untimed
    }
    of_test = Scores(scores["test"], None)
    summary = summarize(rank_state, of_test, loss, started, compression=compression, sent=sent)
    summary["timing"] = {**timing.summary(), "median_seconds": medians}
    record.finish(summary)
    write_timing(timing, run, folder, device)
    print(f"{run.config.model} on {run.job.name}: {run.layout}, {device}\n\n{describe(timing)}\n")
    if len(medians) == 2:
        timed, untimed = medians["timed"], medians["untimed"]
        print(
            f"Every other step ran untimed: {1e3 * untimed:.3f} ms (median), timed "
            f"{1e3 * timed:.3f} ms: {timed / untimed - 1:+.2%}."
        )
    print(where_the_rest_is(folder, run.config.trace))
