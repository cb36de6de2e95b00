"""Trained weights under the unsplit model's parameter names, whatever the layout was.

Load them with one line:

    model.load_state_dict(safetensors.torch.load_file("runs/<time>/model.safetensors"))
"""

from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor


def gather_named(
    mine: dict[str, Tensor], stage_group: dist.ProcessGroup | None, to_stage: int
) -> dict[str, Tensor] | None:
    """Tensors of all parts of the model, on the CPU of one rank of a pipeline.

    Args:
        mine: this rank's tensors, by the unsplit model's names.
        stage_group: the ranks of the pipeline; None where there is one stage.
        to_stage: position in the pipeline of the rank that gets them.

    Returns:
        A copy of every tensor on that rank; None on the others.
    """
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in mine.items()}
    if stage_group is None:
        return copies
    receives = stage_group.rank() == to_stage
    pieces: list[dict[str, Tensor]] | None = [{}] * stage_group.size() if receives else None
    dist.gather_object(copies, pieces, group=stage_group, group_dst=to_stage)
    if pieces is None:
        return None
    return {name: tensor for piece in pieces for name, tensor in piece.items()}


def save_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict as safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
