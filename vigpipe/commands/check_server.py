"""Compare a server and its workers with unsplit models, in one process.

The ranks train, and keep a record. Then one process goes through the record in the order in which
the server took the gradients: it computes each with the weights that its worker had pulled, and
takes the server's step with it. Every loss is compared, and the server's weights at the end.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vigpipe.commands.check_replicas import is_exact, trace_of, train_recorded
from vigpipe.commands.differences import Compared, Kinds, differences
from vigpipe.parallel.agreement import Peers
from vigpipe.parallel.layout import Layout
from vigpipe.replication.record import Recorded
from vigpipe.replication.serving import damping
from vigpipe.replication.strategy import Computed, Item, Outcome, Pushed
from vigpipe.replication.synchronous import Synchronous
from vigpipe.run.batches import read_batch
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import apply_gradients, train_step


def compare_with_server(
    run: Run, rank: int, device: torch.device, num_steps: int
) -> Compared | None:
    """Compare a server and its workers, one item each a step; None but on the writing rank."""
    run = replace(run, config=replace(run.config, steps=num_steps))
    rank_state = make_rank_state(run, rank, device)
    losses, recorded = train_recorded(rank_state)
    trace = trace_of(rank_state, losses)
    if trace is None or not rank_state.is_writer:
        return None
    reference = serve_in_turn(run, recorded, device)
    num_late = sum(push.version - 1 > push.pulled for of in recorded for push in of.pushes)
    against = (
        "against an unsplit model in one process, which took the same gradients in the same order: "
        f"{num_steps * run.layout.num_teams} items, {num_late} of them late"
    )
    return Compared(differences(trace, reference), against, is_exact(run, device))


class _HandsOver(Synchronous):
    """The strategy of a model that computes gradients, and leaves its weights as they are."""

    gradients: Sequence[Tensor] = ()
    stats = loss = torch.zeros(0)

    def combine_gradients(self, own: Computed) -> Outcome:
        assert own.loss is not None
        self.gradients, self.stats, self.loss = own.gradients, own.stats, own.loss
        return Outcome(own.stats, torch.zeros_like(own.is_finite), is_own=False)


def serve_in_turn(run: Run, recorded: Sequence[Recorded], device: torch.device) -> Kinds:
    """Do in one process what a server and its workers did, and return the trace of the server."""
    num_workers = len(recorded)
    layout = Layout(1, run.layout.num_microbatches, num_workers, num_teams=num_workers)
    run = replace(run.unsplit(), layout=layout)
    hands_over = _HandsOver(run.course, 0, Peers())
    worker = make_rank_state(run, 0, device, strategy=hands_over)
    server = make_rank_state(run, 0, device, strategy=Synchronous(run.course, 0, Peers()))
    pairs = ((of.items[i], push) for of in recorded for i, push in enumerate(of.pushes))
    in_order = sorted(pairs, key=lambda pair: pair[1].served)
    last_use = {push.pulled: push.served for _, push in in_order}
    version, versions = 0, {0: _copied(server)}  # the weights after so many updates
    losses: list[float] = []
    for item, push in in_order:
        parameters, pulled = worker.trained.parameters().values(), versions[push.pulled]
        for parameter, of_version in zip(parameters, pulled, strict=True):
            parameter.data.copy_(of_version)
        if last_use[push.pulled] == push.served:
            del versions[push.pulled]
        batch = read_batch(worker, Item(item))
        train_step(worker, batch)
        if push.version == version:
            continue  # not finite, or of no samples
        for parameter, gradient in zip(
            server.trained.parameters().values(), hands_over.gradients, strict=True
        ):
            parameter.grad = gradient.clone()
        staleness = version - push.pulled
        loss = hands_over.loss.item()
        pushed = Pushed(
            replica=item % num_workers,
            item=item,
            step=(push.served - 1) // num_workers,
            num_samples=batch.num_samples,
            loss=loss,
            stats=hands_over.stats,
            seconds=0.0,
            staleness=staleness,
            damping=damping(staleness),
        )
        apply_gradients(server, pushed)
        version = push.version
        if version in last_use:
            versions[version] = _copied(server)
        losses.append(loss)
    for state in (worker, server):
        state.feed.close()
    trace = trace_of(server, losses)
    assert trace is not None
    return trace


def _copied(rank_state: RankState) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in rank_state.trained.parameters().values()]
