"""Steps of one sub-model alone: how much faster than those of the wide model?"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.alone import set_up
from benchmarks.options import OpsBench, WidthsBench
from benchmarks.side_by_side import alternate
from vigpipe.config.options import with_model_defaults
from vigpipe.graphs.features import are_sparse, for_model, in_memory
from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.job import GraphJob, open_graph_job
from vigpipe.graphs.samplers.whole import all_edges
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.run.optimizer import make_optimizer


class Narrow(NamedTuple):
    """What the steps of a sub-model take."""

    m: int  # it has an m-th of the channels
    flops: int  # of the dense matrix products of a step
    whole: Sequence[float]  # seconds of steps from the forward to the update of the weights
    without: Sequence[float]  # of the same without the update


def time_narrow(options: WidthsBench, numbers: Sequence[int]) -> list[Narrow]:
    """Time the steps of a sub-model, whole graph and one thread, beside those of the wide model.

    Args:
        options: of the benchmark.
        numbers: every m; the first is 1, the wide model.
    """
    device = set_up(OpsBench(repeats=options.repeats, threads=1, device=options.device))
    config = replace(options, width=options.alone_width, sampler="full")
    job = open_graph_job(with_model_defaults(config))
    steps: dict[str, Callable[[], object]] = {}
    flops: dict[int, int] = {}
    for m in numbers:
        forward_backward, update = _step(job, m, device)

        def whole(work: Callable[[], object] = forward_backward, then: Any = update) -> None:
            work()
            then()

        steps |= {f"{m}": whole, f"{m}, without": forward_backward}
        with FlopCounterMode(display=False) as counter:
            whole()
        flops[m] = counter.get_total_flops()
    seconds = alternate(steps, "1", options.repeats, device).seconds
    return [Narrow(m, flops[m], seconds[f"{m}"], seconds[f"{m}, without"]) for m in numbers]


def _step(
    job: GraphJob, m: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make a sub-model, its inputs and its optimizer.

    Returns:
        Functions that compute the gradients, and that update the weights.
    """
    graph, config = job.graph, job.config
    torch.manual_seed(0)
    model = job.make_model(m).to(device)
    parameters = [*model.parameters()]
    decay = config.weight_decay or 0.0
    optimizer = make_optimizer(config, [{"params": parameters, "weight_decay": decay}])
    nodes = graph.nodes_of(TRAIN)
    chosen = torch.from_numpy(nodes).to(device)
    labels = torch.from_numpy(graph.labels[nodes]).to(device)
    features = in_memory(graph.features)
    x = for_model(features, are_sparse(graph.features)).to(device, torch.float32)
    adjacency = all_edges(graph).to(device)
    keys = sample_keys(0, 0, torch.arange(graph.num_nodes)).to(device)

    def forward_backward() -> None:
        optimizer.zero_grad()
        logits = model(x, keys, adjacency)[chosen]
        if graph.is_multi_label:
            loss = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        else:
            loss = F.cross_entropy(logits, labels)
        loss.backward()

    return forward_backward, optimizer.step
