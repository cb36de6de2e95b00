"""The command `vigpipe check`: compare a layout with the unsplit model in one process.

Both see the same D x M micro-batches in the same order and begin with the same weights. The loss
and every gradient are compared after every step, every weight and BatchNorm's running statistics
at the end.
"""

import math
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from tabulate import tabulate
from torch import Tensor

from vigpipe.checkpoint.weights_file import gather_named
from vigpipe.errors import DIFFERS, DONE
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.run.step import complete_step, train_step

FLOAT64_ABSOLUTE, FLOAT32_RELATIVE = 1e-10, 1e-5  # the contract's bounds


@dataclass
class Trace:
    """The results of some training steps, under the parameter names of the unsplit model.

    Attributes:
        losses: loss of every step.
        gradients: gradients of every step, by name.
        weights: weights after the last step, by name.
        statistics: running means and variances after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The largest difference over all tensors of one kind.

    Attributes:
        kind: loss, gradients, weights or running statistics.
        absolute: largest difference of two numbers.
        relative: largest difference of two numbers, divided by the largest number of their tensor;
            tensors of mere rounding noise are compared with the largest number of their kind
            instead (`_scale`).
        where: name of the tensor with the largest relative difference.
        identical: whether all tensors are equal bit for bit.
    """

    kind: str
    absolute: float
    relative: float
    where: str
    identical: bool

    def within(self, dtype: torch.dtype) -> bool:
        """Return whether the difference is within the contract's bound for this dtype."""
        if dtype == torch.float64:
            return self.absolute <= FLOAT64_ABSOLUTE
        return self.relative <= FLOAT32_RELATIVE


def trace(rank_state: RankState, num_steps: int) -> Trace | None:
    """Train some steps and record their results; None except on the rank that writes."""
    result = Trace()
    for batch in islice(batches(rank_state), num_steps):
        step = train_step(rank_state, batch)
        complete_step(rank_state)
        gradients = {n: p.grad for n, p in rank_state.parameters().items() if p.grad is not None}
        gathered = _gathered(rank_state, gradients)
        if gathered is not None and step.loss is not None:
            result.losses.append(step.loss)
            result.gradients.append(gathered)
    gathered = _gathered(rank_state, rank_state.state())
    if gathered is None or not rank_state.is_writer:
        return None
    for name, tensor in gathered.items():
        if name in rank_state.run.parameter_order:
            result.weights[name] = tensor
        elif tensor.is_floating_point():
            result.statistics[name] = tensor
    return result


def _gathered(rank_state: RankState, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    return gather_named(tensors, rank_state.pipeline_group, rank_state.run.layout.pipeline_size - 1)


def differences(actual: Trace, reference: Trace) -> list[Difference]:
    """Compare two traces, kind by kind."""
    losses = [{"loss": torch.tensor(t.losses, dtype=torch.float64)} for t in (actual, reference)]
    gradients = [
        {f"{n} (step {i + 1})": g for i, step in enumerate(t.gradients) for n, g in step.items()}
        for t in (actual, reference)
    ]
    return [
        _difference("loss", losses[0], losses[1]),
        _difference("gradients", gradients[0], gradients[1]),
        _difference("weights", actual.weights, reference.weights),
        _difference("running statistics", actual.statistics, reference.statistics),
    ]


def _difference(kind: str, actual: dict[str, Tensor], reference: dict[str, Tensor]) -> Difference:
    if actual.keys() != reference.keys():
        odd = sorted(actual.keys() ^ reference.keys())
        raise AssertionError(f"{kind}: only one of the two has {', '.join(odd)}")
    largest = max((float(t.abs().max()) for t in reference.values()), default=0.0)
    absolute, relative, where = 0.0, 0.0, ""
    for name, expected in reference.items():
        difference = float((actual[name].double() - expected.double()).abs().max())
        if math.isnan(difference):
            difference = math.inf
        ratio = difference / _scale(expected, largest)
        absolute = max(absolute, difference)
        if ratio > relative:
            relative, where = ratio, name
    identical = all(torch.equal(actual[name], expected) for name, expected in reference.items())
    return Difference(kind, absolute, relative, where, identical)


def _scale(tensor: Tensor, largest_of_kind: float) -> float:
    # The gradient of a bias before a BatchNorm is zero except for rounding. So a tensor that is
    # more than a thousand times smaller than the largest of its kind is compared with a thousandth
    # of that.
    return max(float(tensor.abs().max()), 1e-3 * largest_of_kind, torch.finfo(torch.float64).tiny)


def check(run: Run, rank: int, device: torch.device, folder: Path, num_steps: int = 3) -> int:
    """Compare the layout with the unsplit model, as one rank of the layout.

    Args:
        run: the run.
        rank: position in the world.
        device: device to compute on. The rank with the last stage of replica 0 runs the reference
            there too.
        folder: folder to write the table to, as check.txt.
        num_steps: number of optimizer steps to compare.

    Returns:
        The exit code, 0 or 1, the same on every rank.
    """
    rank_state = make_rank_state(run, rank, device)
    of_layout = trace(rank_state, num_steps)
    failed = torch.zeros(1, device=device)
    if of_layout is not None:
        reference = trace(make_rank_state(run.unsplit(), 0, device), num_steps)
        assert reference is not None
        rows = differences(of_layout, reference)
        # With one replica, every sum has the same terms in the same order as the reference's.
        layout = run.layout
        exact = layout.num_replicas == 1 and layout.schedule != "loopedbfs" and device.type == "cpu"
        wanted = "1e-10" if run.dtype == torch.float64 else "1e-5 relative"
        wanted = "bit for bit" if exact else wanted
        is_equal = all(row.identical or (not exact and row.within(run.dtype)) for row in rows)
        text = report(run, rows, num_steps, wanted)
        text += "\nequal\n" if is_equal else "\nDIFFERENT\n"
        Console(soft_wrap=True, highlight=False).print(text, end="")
        (folder / "check.txt").write_text(text, encoding="utf-8")
        failed.fill_(not is_equal)
    if run.layout.world_size > 1:
        torch.distributed.all_reduce(failed)
    return DIFFERS if failed.item() else DONE


def report(run: Run, rows: list[Difference], num_steps: int, wanted: str) -> str:
    """Write the result as text with a table.

    Args:
        run: the run.
        rows: the differences, one row of the table each.
        num_steps: number of optimizer steps that were compared.
        wanted: the bound that the differences must keep to, in words.

    Returns:
        The text, which ends in a newline.
    """
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
