"""The command `vigpipe time` where replicas take steps of their own: who worked and who waited."""

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
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.strategy import Item, Loop, Pushed
from vigpipe.run.batches import read_batch
from vigpipe.run.evaluation import evaluate
from vigpipe.run.events import open_events
from vigpipe.run.facts import Run
from vigpipe.run.others import all_events
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.record import RunRecord, gradients_row, step_row
from vigpipe.run.step import apply_gradients, complete_step, train_step
from vigpipe.run.summary import gather_accounts, summarize


def time_replicas(
    run: Run, rank: int, device: torch.device, folder: Path, num_test_batches: int
) -> None:
    """Let replicas do the items of a run's steps, warm-up included, and account for their time."""
    started = time.perf_counter()
    rank_state = make_rank_state(run, rank, device)
    own_steps, layout = rank_state.own_steps, run.layout
    assert own_steps is not None
    record = RunRecord(folder, as_toml(run.config)) if rank_state.is_writer else None
    timed = _Timed(rank_state, own_steps, record)
    for item in own_steps.items(0, is_evaluated=True, loop=timed):
        timed.take(item)
    accounts = gather_accounts(rank_state, timed.account())
    rows = all_events(own_steps.membership, layout.world_size)
    own_steps.membership.close()
    if layout.has_server:
        rank_state.trained.copy_from(layout.writer, rank_state.mesh.counterparts)
    scores = evaluate(rank_state, ("test",), num_test_batches * run.batch_size)
    rank_state.feed.close()
    if record is None or scores is None:
        return
    events = open_events(run, folder, None)
    events.add(rows)
    events.finish()
    summary = summarize(rank_state, Scores(scores["test"], None), timed.loss, started, accounts)
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


class _Timed(Loop):
    """A loop that takes steps, and leaves the first ones of a rank out of its account."""

    def __init__(
        self, rank_state: RankState, own_steps: OwnSteps, record: RunRecord | None
    ) -> None:
        self._state, self._strategy, self._record = rank_state, own_steps, record
        layout = rank_state.run.layout
        is_server = rank_state.mesh.replica_index == layout.num_replicas
        num_warmup = rank_state.run.config.timing_warmup
        self._num_left_out = num_warmup * (layout.num_replicas if is_server else 1)
        self._num_items, self._before = 0, {}
        self.loss: float | None = None  # of the last step, if it is known

    def complete(self) -> None:
        """Count from here on, if the first steps are over."""
        if self._num_items == self._num_left_out:
            self._before = self._before or dict(self._strategy.account())

    def take(self, item: Item) -> None:
        self.complete()
        state, run = self._state, self._state.run
        batch = read_batch(state, item)
        step = train_step(state, batch)
        complete_step(state)
        self._strategy.hear(step.agreement, is_full=run.fill(item.number).is_full)
        self._num_items, self.loss = self._num_items + 1, step.loss
        if self._record is not None and step.loss is not None and any(batch.sizes):
            facts = batch.step + 1, run.course.epoch(batch.step), step.loss, step.lr, step.seconds
            waited, whose = step.agreement.data_seconds, {"replica": 0, "item": item.number}
            rates = run.job.rates(*run.in_batches(item.number), batch.num_samples, step.seconds)
            self._record.add_step(step_row(*facts, rates, waited, **whose))

    def apply(self, pushed: Pushed) -> None:
        self.complete()
        run, lr = self._state.run, apply_gradients(self._state, pushed)
        self._num_items, self.loss = self._num_items + 1, pushed.loss
        if self._record is not None:
            size = *run.in_batches(pushed.item), pushed.num_samples
            rates = run.job.rates(*size, pushed.seconds)
            self._record.add_step(gradients_row(pushed, run.course, lr, rates))

    def account(self) -> dict[str, Any]:
        """Return what the rank has counted since the first steps."""
        if self._num_items <= self._num_left_out:  # with a pool, a slow replica may have no more
            self._before = dict(self._strategy.account())
        return _difference(self._strategy.account(), self._before)


def _difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an account has counted since an earlier one of the same rank."""
    return {
        name: _difference(value, before.get(name, {}))
        if isinstance(value, Mapping)
        else value - before.get(name, 0)
        for name, value in after.items()
    }
