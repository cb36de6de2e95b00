"""Write files of trained weights under the unsplit model's names, with metadata."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vigpipe.files.atomic import replacing, sync
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.model import mapped
from vigpipe.model.mapped import Shapes
from vigpipe.parallel.values import gather_tensors
from vigpipe.run.folder import MAKE_ROOM

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from vigpipe.run.rank import RankState


def gather_named(
    own_tensors: dict[str, Tensor], pipeline_group: "ProcessGroup | None", pipeline_rank: int
) -> dict[str, Tensor] | None:
    """Gather CPU copies of the tensors of all stages on one rank of a pipeline; None on others."""
    world_size = 1 if pipeline_group is None else pipeline_group.size()
    by_rank = gather_tensors(own_tensors, world_size, pipeline_rank, pipeline_group)
    if by_rank is None:
        return None
    return {name: tensor for tensors in by_rank for name, tensor in tensors.items()}


def save_run_weights(rank_state: "RankState", path: Path) -> None:
    """Write the weights of all stages and metadata, or raise InputError; all ranks call this."""
    last = rank_state.run.layout.pipeline_size - 1
    state = gather_named(rank_state.trained.state(), rank_state.mesh.groups.pipeline, last)
    if state is not None and rank_state.is_writer:
        save_weights(path, state, rank_state.run.weights_metadata())


def save_weights(
    path: Path, state: dict[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write an unsplit model's state dict, with metadata, or raise InputError."""
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    with told_if_unwritable(str(path), MAKE_ROOM), replacing(path) as partial:
        write_tensors(partial, tensors, {"format": "pt", **(metadata or {})})


@contextlib.contextmanager
def save_rows(
    path: Path, tensors: Shapes, metadata: Mapping[str, str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Write weights that are never whole in memory: yield the file's mapped tensors, all zeros."""
    with told_if_unwritable(str(path), MAKE_ROOM), replacing(path) as partial:
        yield mapped.create(partial, tensors, {"format": "pt", **(metadata or {})})
        sync(partial)  # also tells what a file system has noticed late


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file block by block; the tensors are contiguous and on the CPU."""
    start, order = mapped.header(mapped.shapes_of(tensors), metadata)
    with path.open("wb") as file:
        file.write(start)
        for name in order:
            for block in mapped.blocks(tensors[name]):
                file.write(block.view(torch.uint8).numpy().data)
