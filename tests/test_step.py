"""One training step of a rank: when its state changes."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from vigpipe.checkpoint.state import named_tensors
from vigpipe.config.options import TrainConfig
from vigpipe.run.batches import batches
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.training import train_step

COLLECTIVES = ("all_reduce", "all_gather_into_tensor")
CLIPPED = TrainConfig(
    data="fake",
    image_size=8,
    batch_size=8,
    steps=2,
    stages=2,
    dp=2,
    microbatches=2,
    clip=0.1,
    ema=0.9,
)


def changed_when_a_collective_begins(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What of a rank's state differs from that before the step.

    Returns:
        Names of tensors at any of the step's collectives, and after the step.
    """
    torch.set_num_threads(1)
    rank_state = make_rank_state(prepare(CLIPPED, torch.float32), rank, torch.device("cpu"))
    first, second = (batch for _, batch, _ in islice(batches(rank_state), 2))
    train_step(rank_state, first)  # the optimizer has a state only then
    before = {name: tensor.clone() for name, tensor in named_tensors(rank_state).items()}

    def changed() -> list[str]:
        now = named_tensors(rank_state)
        return [name for name in before if not torch.equal(now[name], before[name])]

    seen: dict[str, list[str]] = {name: [] for name in COLLECTIVES}

    def watched(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **options: Any) -> Any:
            seen[name] += changed() or ["nothing"]
            return collective(*args, **options)

        return watch

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        train_step(rank_state, second)
    rank_state.reader.close()
    assert all(seen.values()), "a kind of collective is not watched any more"
    at_collectives = {name for names in seen.values() for name in names} - {"nothing"}
    return sorted(at_collectives), changed()


@pytest.mark.multiprocess
def test_no_state_changes_before_the_last_collective_of_a_step():
    """A rank that loses its peer in a collective saves its state as that of the step before.

    Running statistics of BatchNorm moved before --clip asked the other stages for their norms: what
    was rescued from there differed from the step's checkpoint in 69 tensors, and the statistics
    moved once more when the run went on.
    """
    for at_collectives, after in run_ranks(changed_when_a_collective_begins, 4):
        assert at_collectives == []
        kinds = {name.split("/")[0] for name in after}
        assert kinds == {"model", "ema", "optimizer"}
        assert any(name.endswith("running_mean") for name in after)
