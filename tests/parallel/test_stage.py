"""A stage asks for a message before it needs it, and for no more than one."""

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from tests.world import run_ranks
from vigpipe.parallel.stage import Stage

LATEST = timedelta(seconds=120)  # until a message is given up that never comes


class Waiting(nn.Linear):
    """The second of two stages, which ends its first forward once the first stage has sent all."""

    def __init__(self, store: Any) -> None:
        super().__init__(3, 3)
        self.store, self.is_first = store, True

    def forward(self, input: Tensor) -> Tensor:
        if self.is_first:
            self.store.wait(["sent"], LATEST)
        self.is_first = False
        return super().forward(input)


def losses(rank: int, world_size: int) -> list[float]:
    store: Any = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), Waiting(store)
    example = torch.empty(2, 3, device="meta", requires_grad=rank > 0)
    output = torch.empty(2, 3, device="meta", requires_grad=True)
    one = Stage(
        None,
        nullcontext(),
        2,
        (first, second)[rank],
        rank,
        2,
        torch.device("cpu"),
        input_args=example,
        output_args=output,
    )
    ask = one.get_bwd_recv_ops

    def tell(bwd_chunk_id: int) -> list[dist.P2POp]:
        store.set("sent", "")  # GPipe has waited for the sends of all micro-batches
        return ask(bwd_chunk_id)

    if rank == 0:
        one.get_bwd_recv_ops = tell
    schedule = ScheduleGPipe(one, 2, lambda y, _: y.square().sum())
    x, found = torch.arange(12.0).view(4, 3), []
    if rank == 0:
        schedule.step(x)
        return []
    schedule.step(target=x, losses=found)
    expected = [second(first(half)).square().sum() for half in x.split(2)]
    assert all(map(torch.equal, found, expected))
    return list(map(float, found))


@pytest.mark.multiprocess
def test_a_message_arrives_while_the_receiver_computes():
    """A rank that asked when it needs it would never get it, for its sender waits for it, too."""
    assert len(run_ranks(losses, 2)[1]) == 2
