"""The exactness contract as a command: a layout against the unsplit model in one process.

Both see the same D x M micro-batches in the same order from the same weights. Compared after every
step: the loss, every gradient; at the end also every weight and BatchNorm's running statistics.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from tabulate import tabulate
from torch import Tensor

from vigpipe.checkpoint.weights_file import gather_named
from vigpipe.data.batches import ReplicaBatch
from vigpipe.errors import DIFFERS, DONE
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.train import train_step

FLOAT64_ABSOLUTE, FLOAT32_RELATIVE = 1e-10, 1e-5  # the contract's bounds


@dataclass
class Trace:
    """What some training steps did, under the unsplit model's names.

    Attributes:
        losses: of every step.
        gradients: of every step, by name.
        weights: after the last step.
        statistics: running means and variances after the last step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Largest difference over all tensors of one kind.

    Attributes:
        kind: loss, gradients, weights, running statistics.
        absolute: largest difference of two numbers.
        relative: largest difference of two numbers over the largest number of the tensor they are
            in; tensors that are rounding noise are held against the largest number of their kind
            (`_scale`).
        where: name of the tensor with the largest relative difference.
        identical: equal bit for bit.
    """

    kind: str
    absolute: float
    relative: float
    where: str
    identical: bool

    def within(self, dtype: torch.dtype) -> bool:
        """Whether the contract's bound for this dtype holds."""
        if dtype == torch.float64:
            return self.absolute <= FLOAT64_ABSOLUTE
        return self.relative <= FLOAT32_RELATIVE


def trace(rank_state: RankState, num_steps: int) -> Trace | None:
    """Train some steps and keep what they did; None except on the rank that writes."""
    kept = Trace()
    for batch in islice(_endless(rank_state), num_steps):
        loss, _ = train_step(rank_state, batch)
        gradients = {n: p.grad for n, p in rank_state.parameters().items() if p.grad is not None}
        gathered = _gathered(rank_state, gradients)
        if gathered is not None and loss is not None:
            kept.losses.append(loss)
            kept.gradients.append(gathered)
    gathered = _gathered(rank_state, rank_state.state())
    if gathered is None or not rank_state.is_writer:
        return None
    for name, tensor in gathered.items():
        if name in rank_state.run.parameter_order:
            kept.weights[name] = tensor
        elif tensor.is_floating_point():
            kept.statistics[name] = tensor
    return kept


def _gathered(rank_state: RankState, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    return gather_named(tensors, rank_state.pipeline_group, rank_state.run.layout.pipeline_size - 1)


def _endless(rank_state: RankState) -> Iterator[ReplicaBatch]:
    for _, batch, _ in batches(rank_state):
        yield batch


def differences(ours: Trace, reference: Trace) -> list[Difference]:
    """Compare two traces, kind by kind."""
    losses = [{"loss": torch.tensor(t.losses, dtype=torch.float64)} for t in (ours, reference)]
    gradients = [
        {f"{n} (step {i + 1})": g for i, step in enumerate(t.gradients) for n, g in step.items()}
        for t in (ours, reference)
    ]
    return [
        _difference("loss", losses[0], losses[1]),
        _difference("gradients", gradients[0], gradients[1]),
        _difference("weights", ours.weights, reference.weights),
        _difference("running statistics", ours.statistics, reference.statistics),
    ]


def _difference(kind: str, ours: dict[str, Tensor], reference: dict[str, Tensor]) -> Difference:
    if ours.keys() != reference.keys():
        odd = sorted(ours.keys() ^ reference.keys())
        raise AssertionError(f"{kind}: only one of the two has {', '.join(odd)}")
    largest = max((float(t.abs().max()) for t in reference.values()), default=0.0)
    absolute, relative, where = 0.0, 0.0, ""
    for name, theirs in reference.items():
        difference = float((ours[name].double() - theirs.double()).abs().max())
        if math.isnan(difference):
            difference = math.inf
        ratio = difference / _scale(theirs, largest)
        absolute = max(absolute, difference)
        if ratio > relative:
            relative, where = ratio, name
    identical = all(torch.equal(ours[name], theirs) for name, theirs in reference.items())
    return Difference(kind, absolute, relative, where, identical)


def _scale(tensor: Tensor, largest_of_kind: float) -> float:
    # The gradient of a bias before a BatchNorm is zero but for rounding: a tensor a thousand times
    # smaller than the largest of its kind is held against a thousandth of that.
    return max(float(tensor.abs().max()), 1e-3 * largest_of_kind, torch.finfo(torch.float64).tiny)


def check(run: Run, rank: int, device: torch.device, folder: Path, num_steps: int = 3) -> int:
    """Compare as one rank of the layout; every rank returns the same exit code, 0 or 1.

    Args:
        run: the run.
        rank: position in the world.
        device: where to compute; the reference runs there too, on the rank that has the last stage
            of replica 0.
        folder: takes the table as check.txt.
        num_steps: optimizer steps to compare.
    """
    rank_state = make_rank_state(run, rank, device)
    ours = trace(rank_state, num_steps)
    failed = torch.zeros(1, device=device)
    if ours is not None:
        reference = trace(make_rank_state(run.unsplit(), 0, device), num_steps)
        assert reference is not None
        rows = differences(ours, reference)
        # With one replica the terms of every sum are the reference's own, in its order.
        layout = run.layout
        exact = layout.num_replicas == 1 and layout.schedule != "loopedbfs" and device.type == "cpu"
        wanted = "1e-10" if run.dtype == torch.float64 else "1e-5 relative"
        wanted = "bit for bit" if exact else wanted
        good = all(row.identical or (not exact and row.within(run.dtype)) for row in rows)
        text = report(run, rows, num_steps, wanted)
        text += "\nequal\n" if good else "\nDIFFERENT\n"
        Console(soft_wrap=True, highlight=False).print(text, end="")
        (folder / "check.txt").write_text(text, encoding="utf-8")
        failed.fill_(not good)
    if run.layout.world_size > 1:
        torch.distributed.all_reduce(failed)
    return DIFFERS if failed.item() else DONE


def report(run: Run, rows: list[Difference], num_steps: int, wanted: str) -> str:
    """The table in words and figures."""
    config, layout = run.config, run.layout
    count = layout.num_replicas * layout.num_microbatches
    table = tabulate(
        [
            (
                r.kind,
                f"{r.absolute:.3g}",
                f"{r.relative:.3g}",
                (r.identical and "yes") or "no",
                r.where,
            )
            for r in rows
        ],
        headers=["", "largest difference", "relative", "bit for bit", "in"],
        disable_numparse=True,
    )
    return (
        f"{config.model} on {run.source.name}, {layout}, {config.dtype}, {config.norm} norm\n"
        f"against the unsplit model in one process on the same {count} micro-batches, "
        f"{num_steps} steps of {run.batch_size} samples; wanted: {wanted}\n\n{table}\n"
    )
