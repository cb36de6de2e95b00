"""Decide at the end of a run what is kept of replicas that differ (--final)."""

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.job.score import SHARES, as_text, name_of
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.own_steps import OwnSteps
from vigpipe.replication.strategy import Item
from vigpipe.run.batches import read_batch
from vigpipe.run.evaluation import evaluate, evaluate_passes
from vigpipe.run.rank import RankState

MOST_STEPS = 20  # batches that BatchNorm's statistics are estimated with


def share_evaluation(rank_state: RankState, left: Counterparts) -> None:
    """Let all replicas that are left share an evaluation; with a server, all take its weights."""
    run = rank_state.run
    if rank_state.merged is not None:  # all of them take every sample through it
        return
    rank_state.scorers = left
    if run.layout.has_server:
        rank_state.trained.copy_from(left.size - 1, left)


def settle(rank_state: RankState, left: Counterparts, own_steps: OwnSteps) -> str | None:
    """Make all replicas equal after the last step; say what was kept, None if they never differed.

    All ranks that are left call this. BatchNorm's statistics are estimated anew, over the first
    batches of the training order: the averaged ones are not those of the weights that are kept.
    """
    run, layout = rank_state.run, rank_state.run.layout
    if rank_state.merged is not None:
        kept, num_batches = _merge(rank_state, left, own_steps)
    elif layout.num_teams == 1 or layout.has_server:
        return None
    else:
        keep = _keep_best if run.config.final == "best" else _keep_mean
        kept = keep(rank_state, left, own_steps)
        num_batches = _estimate_statistics(rank_state, left)
    if num_batches:
        kept += f"; BatchNorm's statistics are those of {num_batches} batches"
    return kept


def _merge(rank_state: RankState, left: Counterparts, own_steps: OwnSteps) -> tuple[str, int]:
    """Score the sub-networks by themselves, and make one model of them; see `settle`."""
    scores = evaluate_passes(rank_state, own=True)
    own = {split: score.numbers() for split, score in scores.items()}
    by_rank = own_steps.membership.all_gather(own)
    rank_state.own_scores = [by_rank[rank] for rank in sorted(by_rank) if by_rank[rank]]
    with left.at_once():
        own_steps.average_at_the_end(left)
    num_batches = take_over_merged(rank_state)
    name = SHARES[rank_state.run.job.unit][0]
    each = ", ".join(f"{scores['test'][name]:.2%}" for scores in rank_state.own_scores)
    kept = (
        f"put {len(rank_state.own_scores)} sub-networks together, which by themselves have a test "
        f"{name_of(name)} of {each}"
    )
    return kept, num_batches


def take_over_merged(rank_state: RankState) -> int:
    """Put the sub-networks together; return how many batches BatchNorm's statistics are of."""
    run, merged = rank_state.run, rank_state.merged
    if merged is None:
        return 0
    merged.take_over()
    if run.config.norm != "batch":
        return 0
    num_batches = min(MOST_STEPS, run.steps_per_epoch)
    items = run.course.items(0, num_batches, 0)  # the same ones on all replicas
    merged.estimate_statistics(lambda item: read_batch(rank_state, Item(item)), items)
    return num_batches


def _keep_mean(rank_state: RankState, left: Counterparts, own_steps: OwnSteps) -> str:
    team_size = rank_state.run.layout.team_size
    num = left.size // team_size
    what = f"{num} {'replicas' if team_size == 1 else 'hosts'}"
    own = [p.detach().clone() for p in rank_state.trained.parameters().values()]
    with left.at_once():
        own_steps.average_at_the_end(left)
    averages = [t for t in rank_state.trained.average().values() if t.is_floating_point()]
    if averages:
        one = torch.ones((), dtype=torch.float64, device=rank_state.device)
        with left.at_once():
            means, _ = Exchange(left).mean(averages, one)
        for average, mean in zip(averages, means, strict=True):
            average.copy_(mean)
    farthest = max(_distances(rank_state, own, left))
    if num == 1:
        return "kept the weights of the only one that is left"
    if not farthest:
        return f"the {what} were averaged: one set of weights"
    return (
        f"kept the mean of {what}, of which the farthest differs from it by "
        f"{farthest:.2%} of its norm"
    )


def _keep_best(rank_state: RankState, left: Counterparts, own_steps: OwnSteps) -> str:
    """Copy the weights of the replica with the best validation score to all others."""
    run = rank_state.run
    scores = evaluate(rank_state, ("validation",))
    own, (_, of_team) = None, run.layout.team_of(rank_state.mesh.replica_index)
    name = SHARES[run.job.unit][0]
    if scores is not None and of_team == 0:
        score = scores["validation"]
        own = rank_state.mesh.replica_index, score.main, score.loss  # those of all its team
    told = own_steps.membership.all_gather(own).values()
    scores = [s for s in told if s is not None]
    best, *others = sorted(scores, key=lambda s: (-s[1], s[2], s[0]))
    size = run.layout.team_size
    rank_state.trained.copy_from(sorted(s[0] for s in scores).index(best[0]) * size, left)
    if not others:
        return f"kept replica {best[0]}, the only one that is left"
    second = others[0]
    return (
        f"kept replica {best[0]} of {len(scores)}, with validation {as_text(name, best[1])} and "
        f"loss {best[2]:.4f}; the next best is replica {second[0]} with {second[1]:.2%} and "
        f"{second[2]:.4f}"
    )


def _distances(rank_state: RankState, own: list[Tensor], left: Counterparts) -> list[float]:
    """Return how far the weights of each replica were from those kept, over the latter's norm."""
    squares = torch.zeros(2, dtype=torch.float64, device=rank_state.device)
    for before, kept in zip(own, rank_state.trained.parameters().values(), strict=True):
        squares[0] += (before.double() - kept.detach().double()).square().sum()
        squares[1] += kept.detach().double().square().sum()
    if rank_state.mesh.groups.pipeline is not None:
        dist.all_reduce(squares, group=rank_state.mesh.groups.pipeline)
    with left.at_once():
        by_replica = left.gather(squares)
    return (by_replica[:, 0] / by_replica[:, 1]).sqrt().tolist()


def _estimate_statistics(rank_state: RankState, left: Counterparts) -> int:
    """Estimate BatchNorm's statistics on batches that all replicas share; return their number."""
    run, statistics = rank_state.run, rank_state.trained.statistics
    if run.config.norm != "batch":
        return 0
    stats: list[Tensor] = []
    num_batches = min(MOST_STEPS, run.steps_per_epoch)
    items = run.course.items(0, num_batches, rank_state.mesh.replica_index)
    for i, item in enumerate(items):
        batch = read_batch(rank_state, Item(item, ahead=items[i + 1 :]))
        rank_state.pipeline.forward_only(batch)
        taken = statistics.take()
        with left.at_once():
            by_replica = left.gather(taken.flatten())
        stats.append(by_replica.view(-1, *taken.shape[1:]))
    statistics.update(torch.cat(stats), momentum=1.0)
    return num_batches


class Kept:
    """The weights of a rank at the end of the training, in case that settling begins anew."""

    def __init__(self, rank_state: RankState) -> None:
        own_steps = rank_state.own_steps
        outlives = own_steps is not None and own_steps.membership.outlives
        trained = rank_state.trained
        self._tensors = [*trained.state().values(), *trained.average().values()]
        self._copies = [tensor.clone() for tensor in self._tensors] if outlives else []

    @torch.no_grad()
    def restore(self) -> None:
        """Make them the weights of the rank again."""
        for tensor, copy in zip(self._tensors, self._copies, strict=False):
            tensor.copy_(copy)
