"""All steps of a run of one rank, in this process."""

import torch
from torch import Tensor

from vigpipe.checkpoint.state import named_tensors
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import complete_step, train_step


def state_after(run: Run, device: torch.device) -> tuple[list[float | None], dict[str, Tensor]]:
    """The losses of the steps, and copies of all that a checkpoint holds after them."""
    rank_state, losses = make_rank_state(run, 0, device), []
    for batch in batches(rank_state):
        step = train_step(rank_state, batch)
        complete_step(rank_state)
        losses.append(step.loss)
    rank_state.feed.close()
    return losses, {name: tensor.clone() for name, tensor in named_tensors(rank_state).items()}
