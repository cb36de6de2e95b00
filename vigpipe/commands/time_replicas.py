"""The command `vigpipe time` where replicas take steps of their own: who worked, waited, averaged.

The parts of a step are those of a synchronous run, which the command times in all detail. Here the
question is how evenly the replicas work, and what they wait for.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from vigpipe.config.files import as_toml
from vigpipe.job.rows import trained_on
from vigpipe.job.score import Scores
from vigpipe.replication.metrics import (
    EVENNESS,
    SERVER,
    heads_of_each,
    partial_items,
    rows_of_each,
    rows_of_evenness,
    rows_of_server,
    samples_per_second,
)
from vigpipe.replication.strategy import AverageWeights, TakeGradients, TakeItem
from vigpipe.run.batches import read_batch
from vigpipe.run.evaluation import evaluate
from vigpipe.run.events import open_events
from vigpipe.run.facts import Run
from vigpipe.run.others import all_events
from vigpipe.run.rank import make_rank_state
from vigpipe.run.record import RunRecord, gradients_row, step_row
from vigpipe.run.step import apply_gradients, complete_step, train_step
from vigpipe.run.summary import gather_accounts, summarize


def time_replicas(
    run: Run, rank: int, device: torch.device, folder: Path, num_test_batches: int
) -> None:
    """Let replicas do the items of some steps, as one rank, and account for their time.

    Args:
        run: the run; its number of steps is that of all steps, the warm-up included.
        rank: position in the world.
        device: device of this rank.
        folder: folder of the run's files.
        num_test_batches: batches of the evaluation that each replica makes at the end.
    """
    started = time.perf_counter()
    rank_state = make_rank_state(run, rank, device)
    strategy, layout, loss = rank_state.strategy, run.layout, None
    record = RunRecord(folder, as_toml(run.config)) if rank_state.is_writer else None
    num_items, before = 0, {}
    is_server = rank_state.replica_index == layout.num_replicas
    num_left_out = run.config.timing_warmup * (layout.num_replicas if is_server else 1)
    for turn in strategy.turns(0, is_evaluated=True):
        if num_items == num_left_out:
            before = before or dict(strategy.account())
        if isinstance(turn, AverageWeights):
            strategy.average_weights()
        if isinstance(turn, TakeGradients):
            lr, loss = apply_gradients(rank_state, turn), turn.loss
            num_items += 1
            if record is not None:
                rates = run.job.rates(*run.in_batches(turn.item), turn.num_samples, turn.seconds)
                record.add_step(gradients_row(turn, run.course, lr, rates))
        if not isinstance(turn, TakeItem):
            continue
        batch = read_batch(rank_state, turn)
        step = train_step(rank_state, batch)
        complete_step(rank_state)
        strategy.hear(step.agreement, is_full=run.fill(turn.item).is_full)
        num_items, loss = num_items + 1, step.loss
        if record is not None and loss is not None and any(batch.sizes):
            facts = batch.step + 1, run.course.epoch(batch.step), loss, step.lr, step.seconds
            waited, whose = step.agreement.data_seconds, {"replica": 0, "item": turn.item}
            rates = run.job.rates(*run.in_batches(turn.item), batch.num_samples, step.seconds)
            record.add_step(step_row(*facts, rates, waited, **whose))
    if num_items <= num_left_out:  # with a pool, of a slow replica
        before = dict(strategy.account())
    account = _difference(strategy.account(), before)
    accounts = gather_accounts(rank_state, account)
    rows = all_events(strategy, layout.world_size)
    strategy.close()
    if layout.has_server:
        rank_state.copy_from(layout.writer, rank_state.counterparts)
    scores = evaluate(rank_state, ("test",), num_test_batches * run.batch_size)
    rank_state.feed.close()
    if record is None or scores is None:
        return
    events = open_events(run, folder, None)
    events.add(rows)
    events.finish()
    summary = summarize(rank_state, Scores(scores["test"], None), loss, started, accounts)
    record.finish(summary)
    found, samples = summary["replicas"], trained_on(run.job.unit)
    print(f"{run.config.model} on {run.job.name}: {layout}, {device}\n")
    table = rows_of_each(found["each"])
    print(tabulate(table, heads_of_each(samples), disable_numparse=True), end="\n\n")
    if of_partial := partial_items(found["each"]):
        print(of_partial, end="\n\n")
    if "server" in found:
        table = rows_of_server(found["server"])
        print(tabulate(table, SERVER, disable_numparse=True), end="\n\n")
    print(tabulate(rows_of_evenness(found), EVENNESS, disable_numparse=True), end="\n\n")
    print(
        f"{sum(map(samples_per_second, found['each'])):,.1f} {samples}/s of all replicas; the "
        f"first {run.config.timing_warmup} items of each are left out.\n"
        "vigpipe time --strategy synchronous times the parts of a step, and vigpipe report "
        f"{folder} draws who did what when."
    )


def _difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an account has counted since an earlier one of the same rank."""
    return {
        name: _difference(value, before.get(name, {}))
        if isinstance(value, Mapping)
        else value - before.get(name, 0)
        for name, value in after.items()
    }
