"""kNN and max-relative aggregation, forward and backward: fused, plain, and as everyone does it."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from vigpipe import ops
from vigpipe.bench import reference
from vigpipe.bench.alone import MB, peaks, relative_difference, set_up, write_page
from vigpipe.bench.options import OpsBench
from vigpipe.bench.side_by_side import alternate

CONTENDERS = ("reference", "plain", "fused")


@dataclass(frozen=True)
class Case:
    """Sizes: images, nodes, channels, neighbours, dilation."""

    batch: int
    nodes: int
    channels: int
    k: int
    dilation: int = 1

    def __str__(self) -> str:
        sizes = f"B={self.batch}, N={self.nodes}, C={self.channels}, k={self.k}"
        return sizes if self.dilation == 1 else f"{sizes}, dilation {self.dilation}"


CASES = (Case(8, 196, 192, 9), Case(8, 196, 192, 18, 3), Case(4, 1024, 64, 9))


def inputs_of(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes, which want a gradient, and the gradient of their aggregate: (B, N, C) each."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.nodes, case.channels)
    x, grad = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    return x.requires_grad_(), grad


def make(case: Case, name: str, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """The contender: graph, aggregate and gradient of x, all channels last."""
    x, grad = inputs_of(case, device)
    dense = x.detach().transpose(1, 2).unsqueeze(-1).contiguous().requires_grad_()
    dense_grad = grad.transpose(1, 2).unsqueeze(-1).contiguous()

    def run_reference() -> tuple[Tensor, ...]:
        graph, found = reference.neighbours(dense, dense, None, case.k, case.dilation)
        (d_x,) = torch.autograd.grad(found, dense, dense_grad)
        return graph, found.squeeze(-1).transpose(1, 2), d_x.squeeze(-1).transpose(1, 2)

    def run() -> tuple[Tensor, ...]:
        graph, found = ops.neighbours(x, None, None, case.k, case.dilation, fused=name == "fused")
        return graph, found, torch.autograd.grad(found, x, grad)[0]

    return run_reference if name == "reference" else run


def compare(
    case: Case, name: str, theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...]
) -> dict[str, str]:
    """How far a contender is from the reference; result and gradient on the reference's graph."""
    x, grad = inputs_of(case, theirs[0].device)
    found, (d_x,) = theirs[1], theirs[2:]
    if name != "reference":
        found = ops.aggregate(x, None, theirs[0], fused=name == "fused")
        (d_x,) = torch.autograd.grad(found, x, grad)
    same = (ours[0] == theirs[0]).all(-1)  # (B, N)
    return {
        "nodes with another graph": f"{int((~same).sum())} of {same.numel()}",
        "result": f"{relative_difference(found, theirs[1]):.1e}",
        "gradient": f"{relative_difference(d_x, theirs[2]):.1e}",
    }


def bench_ops(config: OpsBench) -> None:
    """Time the cases, compare results and gradients, and measure memory."""
    device = set_up(config)
    rows: list[dict[str, object]] = []
    seconds: dict[str, list[float]] = {}
    for case in CASES:
        contenders = {name: make(case, name, device) for name in CONTENDERS}
        timings = alternate(contenders, "reference", config.repeats, device)
        results = {name: contender() for name, contender in contenders.items()}
        theirs = results["reference"]
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
                    **compare(case, name, theirs, results[name]),
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
