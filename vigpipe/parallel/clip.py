"""Gradient clipping by the norm over all stages."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    order: Mapping[str, int],
    max_norm: float,
    pipeline_group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`.

    The squared norms of all parameters are summed in float64 in the order of the unsplit model,
    whichever stage holds them, so the result does not depend on the cut. `order` has the index of
    each name among all parameters of the unsplit model. The group are the ranks of this pipeline;
    None if it has a single rank. The norm before clipping, a scalar on the device, is returned.
    """
    owned = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    gradients = list(owned.values())  # none where all stages of a rank are frozen
    norms = [torch.zeros((), dtype=torch.float64, device=device)] * len(order)
    own_norms = torch._foreach_norm(gradients, 2, torch.float64) if gradients else ()
    for name, norm in zip(owned, own_norms, strict=True):
        norms[order[name]] = norm
    squares = torch.stack(norms).square()
    if pipeline_group is not None and pipeline_group.size() > 1:
        # Exact: only one rank has a term that is not zero.
        dist.all_reduce(squares, group=pipeline_group)
    total = squares.sum().sqrt()
    scale = (max_norm / total).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))
    return total
