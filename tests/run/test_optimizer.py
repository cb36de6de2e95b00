"""What an optimizer keeps before its first step is what it would begin with."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from vigpipe.config.choices import Optimizer
from vigpipe.config.options import TrainConfig
from vigpipe.run.optimizer import begin_state, first_state, make_optimizer
from vigpipe.run.room import KEPT


@pytest.mark.parametrize("opt", get_args(Optimizer))
def test_an_optimizer_with_a_state_does_what_one_without_does(opt: Optimizer) -> None:
    config = TrainConfig(opt=opt, lr=0.1)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for begins in (False, True):
        torch.manual_seed(1)
        weights = nn.Parameter(torch.randn(3, 2))
        optimizer = make_optimizer(config, [{"params": [weights]}])
        if begins:
            begin_state(optimizer, first_state(config, torch.float32, torch.device("cpu")))
        for _ in range(3):
            weights.grad = torch.randn(3, 2)
            optimizer.step()
        found.append((weights.detach(), optimizer.state[weights]))
    (expected, state), (weights, begun) = found
    assert torch.equal(weights, expected)
    assert begun.keys() == state.keys()
    assert sum(tensor.dim() > 0 for tensor in state.values()) == KEPT[opt]
    assert all(torch.equal(begun[kind], tensor) for kind, tensor in state.items())
    assert all(begun[kind].dtype == tensor.dtype for kind, tensor in state.items())
