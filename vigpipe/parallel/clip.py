"""Gradient clipping by the norm over all stages."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    order: Mapping[str, int],
    max_norm: float,
    pipeline_group: dist.ProcessGroup | None,
) -> float:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`.

    The squared norms of all parameters are summed in float64 in the order of the unsplit model,
    whichever stage holds them, so the result does not depend on the cut.

    Args:
        parameters: this rank's parameters by their names in the unsplit model.
        order: index of each name among all parameters of the unsplit model.
        max_norm: the largest norm allowed.
        pipeline_group: the ranks of this pipeline; None if it has a single rank.

    Returns:
        The norm before clipping, over all stages.
    """
    squares = torch.zeros(len(order), dtype=torch.float64)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            squares[order[name]] = norm.square()
    if pipeline_group is not None and pipeline_group.size() > 1:
        device = next(iter(parameters.values())).device
        shared = squares.to(device)
        dist.all_reduce(
            shared, group=pipeline_group
        )  # exact: only one rank has a term that is not zero
        squares = shared.cpu()
    total = math.sqrt(float(squares.sum()))
    if total > max_norm:
        scale = max_norm / total
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return total
