"""Write the weights of the wide model that the sub-networks of a run have trained."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.checkpoint.weights_file import save_rows
from vigpipe.parallel.values import all_gather_values, dtype_name, dtype_of

if TYPE_CHECKING:
    from vigpipe.replication.subnetworks.rows import WideRows
    from vigpipe.run.mesh import Mesh
    from vigpipe.run.rank import RankState

_LONGEST_SIDE = 1024  # entries of a tile in any dimension
Tile = tuple[slice, ...]


def save_wide_weights(rank_state: "RankState", path: Path) -> None:
    """Write the wide model's weights tile by tile, or raise InputError; all ranks call this."""
    run, rows, mesh = rank_state.run, rank_state.wide_rows, rank_state.mesh
    assert rows is not None
    shapes = {name: t.shape for name, t in run.wide_model.state_dict().items()}
    own = {name: dtype_name(tensor.dtype) for name, tensor in rows.wide.narrow.items()}
    by_stage = all_gather_values(own, *rank_state.strategy.peers)
    dtypes = {name: dtype_of(text) for of_stage in by_stage for name, text in of_stage.items()}
    specs = {name: (dtypes[name], tuple(shape)) for name, shape in shapes.items()}
    file = save_rows(path, specs, run.weights_metadata()) if rank_state.is_writer else nullcontext()
    route = _Route(mesh, run.layout.pipeline_size - 1, rows.across_teams.group)
    with file as targets:
        for stage, names in enumerate(by_stage):
            if mesh.pipeline_rank == stage or rank_state.is_writer:
                for name in names:
                    _collect(rows, name, specs[name], stage, route, targets)


class _Route:
    """How a tile comes from the rank that stores it to the one that writes."""

    def __init__(
        self, mesh: "Mesh", last_stage: int, across_teams: dist.ProcessGroup | None
    ) -> None:
        self._here = mesh.replica_index, mesh.pipeline_rank
        self._across_teams, self._pipeline = across_teams, mesh.groups.pipeline
        self._writer = 0, last_stage

    def begins_here(self, owner: int, stage: int) -> bool:
        """Whether this is the rank of a stage that a replica has."""
        return self._here == (owner, stage)

    def carry(self, own: Tensor | None, like: Tensor, owner: int, stage: int) -> Tensor | None:
        """Send a tile, `own` of its owner, to the rank that writes, and return it there only.

        All ranks on the way call this, through the first replica's; `like` says shape and dtype.
        """
        tile, (_, last) = own, self._writer
        if self.begins_here(owner, stage) and owner > 0:
            assert own is not None
            dist.send(own, group=self._across_teams, group_dst=0)
        if self.begins_here(0, stage):
            if owner > 0:
                tile = torch.empty_like(like, device="cpu")
                dist.recv(tile, group=self._across_teams, group_src=owner)
            if stage != last:
                assert tile is not None
                dist.send(tile, group=self._pipeline, group_dst=last)
        if self._here == self._writer and stage != last:
            tile = torch.empty_like(like, device="cpu")
            dist.recv(tile, group=self._pipeline, group_src=stage)
        return tile if self._here == self._writer else None


def _collect(
    rows: "WideRows",
    name: str,
    spec: tuple[torch.dtype, tuple[int, ...]],
    stage: int,
    route: _Route,
    targets: Mapping[str, Tensor] | None,
) -> None:
    slicing, num = rows.wide.slicing, rows.across_teams.size
    (dtype, shape), owned = spec, slicing.owned(name)
    stored = rows.whole if owned is None else rows.stored
    for owner in range(1 if owned is None else num):
        entries, part = None, shape
        if owned is not None:
            entries = slicing.owned_entries(name, num, owner)
            part = tuple(len(entries) if dim == owned else n for dim, n in enumerate(shape))
        for tile in _tiles(part, num):
            own = None
            if route.begins_here(owner, stage):
                own = stored[name].detach()[tile].cpu().contiguous()
            like = torch.empty([t.stop - t.start for t in tile], dtype=dtype, device="meta")
            found = route.carry(own, like, owner, stage)
            if found is None or targets is None:
                continue
            if entries is None or owned is None:
                targets[name][tile] = found
            else:
                others = tuple(slice(None) if d == owned else t for d, t in enumerate(tile))
                targets[name][others].index_copy_(owned, entries[tile[owned]], found)


def _tiles(shape: tuple[int, ...], num: int) -> Iterator[Tile]:
    """Cut a tensor into tiles, none of which is as long as one of its long sides."""
    steps = [max(1, min(_LONGEST_SIDE, length // num)) for length in shape]
    yield from product(
        *(
            [slice(first, min(first + step, length)) for first in range(0, length, step)]
            for length, step in zip(shape, steps, strict=True)
        )
    )
