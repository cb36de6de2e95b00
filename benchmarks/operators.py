"""Benchmark kNN with max-relative aggregation: fused, plain, and the usual formulation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from benchmarks.alone import MB, peaks, set_up, write_page
from benchmarks.options import OpsBench
from benchmarks.side_by_side import alternate
from vigpipe import ops
from vigpipe.selftest import reference
from vigpipe.selftest.compared import relative_difference

CONTENDERS = ("reference", "plain", "fused")


@dataclass(frozen=True)
class Case:
    """Sizes of a case: images, nodes per image, channels, neighbours and dilation."""

    batch: int
    nodes: int
    channels: int
    k: int
    dilation: int = 1

    def __str__(self) -> str:
        sizes = f"B={self.batch}, N={self.nodes}, C={self.channels}, k={self.k}"
        return sizes if self.dilation == 1 else f"{sizes}, dilation {self.dilation}"


CASES = (Case(8, 196, 192, 9), Case(8, 196, 192, 18, 3), Case(4, 1024, 64, 9))
ON_GPU = 16  # times as many images: with a few, a GPU waits for the host


def cases_of(device: torch.device) -> list[Case]:
    """Return the cases that keep a device busy."""
    times = ON_GPU if device.type == "cuda" else 1
    return [replace(case, batch=times * case.batch) for case in CASES]


def inputs_of(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make random nodes, which require a gradient, and a gradient of their aggregate: (B, N, C)."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.nodes, case.channels)
    x, grad = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return x.requires_grad_(), grad


def make(case: Case, name: str, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """Make a contender, which returns graph, aggregate and gradient of x, all channels last.

    Args:
        case: sizes.
        name: one of CONTENDERS.
        device: device to run on.
    """
    x, grad = inputs_of(case, device)
    dense = x.detach().transpose(1, 2).unsqueeze(-1).contiguous().requires_grad_()
    dense_grad = grad.transpose(1, 2).unsqueeze(-1).contiguous()

    def run_reference() -> tuple[Tensor, ...]:
        graph, aggregate = reference.neighbours(dense, dense, None, case.k, case.dilation)
        (d_x,) = torch.autograd.grad(aggregate, dense, dense_grad)
        return graph, aggregate.squeeze(-1).transpose(1, 2), d_x.squeeze(-1).transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        fused = name == "fused"
        graph = ops.knn(x, None, None, case.k, case.dilation, fused=fused)
        aggregate = ops.aggregate(x, None, graph, fused=fused)
        return graph, aggregate, torch.autograd.grad(aggregate, x, grad)[0]

    return run_reference if name == "reference" else run


def compare(
    case: Case, name: str, expected: tuple[Tensor, ...], actual: tuple[Tensor, ...]
) -> dict[str, str]:
    """Compare a contender with the reference; result and gradient are on the reference's graph.

    Args:
        case: sizes.
        name: one of CONTENDERS.
        expected: graph, aggregate and gradient of the reference.
        actual: the same of the contender.

    Returns:
        Cells of a table by column.
    """
    x, grad = inputs_of(case, expected[0].device)
    aggregate, (d_x,) = expected[1], expected[2:]
    if name != "reference":
        aggregate = ops.aggregate(x, None, expected[0], fused=name == "fused")
        (d_x,) = torch.autograd.grad(aggregate, x, grad)
    same = (actual[0] == expected[0]).all(-1)  # (B, N)
    return {
        "nodes with another graph": f"{int((~same).sum())} of {same.numel()}",
        "result": f"{relative_difference(aggregate, expected[1]):.1e}",
        "gradient": f"{relative_difference(d_x, expected[2]):.1e}",
    }


def bench_ops(config: OpsBench) -> None:
    """Time the cases of `ops`, compare results and gradients, and measure memory."""
    device = set_up(config)
    rows: list[dict[str, object]] = []
    seconds: dict[str, list[float]] = {}
    for case in cases_of(device):
        contenders = {name: make(case, name, device) for name in CONTENDERS}
        timings = alternate(contenders, "reference", config.repeats, device)
        results = {name: contender() for name, contender in contenders.items()}
        expected = results["reference"]
        memory = {
            name: peaks(make, case, name, device=device.type, threads=config.threads)[1]
            for name in CONTENDERS
        }
        for name in CONTENDERS:
            ratios = timings.ratios(name)
            seconds[f"{case}: {name}"] = timings.seconds[name]
            rows.append(
                {
                    "case": str(case),
                    "": name,
                    "ms": f"{1e3 * median(timings.seconds[name]):.2f}",
                    "ratio": f"{median(ratios):.2f}× ({min(ratios):.2f} – {max(ratios):.2f})",
                    "memory, MB": f"{memory[name] / MB:.1f}",
                    "of the reference's": f"1/{memory['reference'] / max(memory[name], 1):.1f}",
                    **compare(case, name, expected, results[name]),
                }
            )
    write_page(
        config.out,
        "kNN and max-relative aggregation",
        f"Graph, aggregation and gradient in float32, {config.threads} thread(s). Memory is what "
        "the work adds to a fresh process. Where a node has another graph, two neighbours are "
        "equally far up to rounding. Result and gradient, on the reference's graph: largest "
        "difference, against the largest number.",
        rows,
        seconds,
        device,
    )
