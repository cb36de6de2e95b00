"""The optimizer of a rank, and what it keeps of each weight."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from vigpipe.config.options import TrainConfig

# Whether torch has one pass over weights, gradients and moments, and whether that can leave out a
# step that is not finite. SGD's cannot: its momentum stays uninitialised if the first step is one.
FUSED, SKIPPING = ("adam", "adamw", "sgd"), ("adam", "adamw")


def make_optimizer(config: TrainConfig, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make the optimizer that the options name; groups of parameters differ in some of them."""
    assert config.opt is not None
    fused: dict[str, Any] = {"fused": True} if config.opt in FUSED else {}
    return create_optimizer_v2([*groups], opt=config.opt, lr=config.lr, weight_decay=0.0, **fused)


def first_state(config: TrainConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return what the optimizer keeps of a number before its first step: zeros, by kind."""
    # A kind with one number for each weight, such as a moment, has one dimension; one with a single
    # number for a whole parameter, such as the step, has none.
    number = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    number.grad = torch.zeros_like(number)
    optimizer = make_optimizer(config, [{"params": [number]}])
    optimizer.step()
    return {kind: torch.zeros_like(tensor) for kind, tensor in optimizer.state[number].items()}


def begin_state(optimizer: torch.optim.Optimizer, first: dict[str, Tensor]) -> None:
    """Give a new optimizer what `first_state` returns, as it would make it in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                kind: torch.zeros_like(parameter) if tensor.dim() else tensor.clone()
                for kind, tensor in first.items()
            }
