"""Store an m-th of the wide model on each rank, and exchange slices with the sub-models.

The m ranks with the same stages divide every tensor along one dimension, which belongs to channels:
rank k stores the entries of block k of the channels, in a file that is mapped into memory. A slice
is a sub-model's tensor: the entries of its channels in every dimension that belongs to channels.

    take   every rank sends each sub-model the parts of its slices that the rank stores,
           at the start of a round
    give   every sub-model sends them back, at its end

No two sub-models have the same channel, so what is given never collides. Entries that are in no
slice keep their values. A tensor without such a dimension is whole in every sub-model, and is
averaged.

With --carry-moments, the optimizer's moments of each weight are further tensors, which are stored,
exchanged and averaged as the weight is.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.model import mapped
from vigpipe.model.slicing import Slicing, block
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.replication.exchange import Exchange
from vigpipe.replication.subnetworks.draws import Channels
from vigpipe.replication.subnetworks.moments import is_moment

_NUMBERS_AT_ONCE = 1 << 24  # limits the slices that are exchanged together
_COLUMNS_AT_ONCE = 512  # limits the columns of a mapped tensor that are copied together
_VARIANCE, _MEAN = "running_var", "running_mean"

Index = Mapping[int, Tensor]  # some entries' indices in each of some dimensions


@dataclass(frozen=True)
class Wide:
    """The wide model of a rank's stages, which no rank ever holds."""

    slicing: Slicing  # which dimension of a tensor belongs to which channels
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors and their moments
    narrow: Mapping[str, Tensor]  # the tensors of this rank's sub-model
    # Writes initial values into a tensor, given its name, and which entries of one dimension it
    # holds; for a whole tensor this index is empty.
    fill: Callable[[Tensor, str, Index], None]
    optimizer: torch.optim.Optimizer  # of the sub-model
    # The optimizer's moments of the weights, if they are exchanged too.
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    # Tells the sub-model which channels it has in a round.
    choose: Callable[[Channels], None] = lambda channels: None


class WideRows:
    """What one rank stores, by name; the ranks with the same stages call each method together."""

    def __init__(self, wide: Wide, across_teams: Counterparts) -> None:
        self.wide, self._slicing, self.across_teams = wide, wide.slicing, across_teams
        self._ranks = range(across_teams.size)
        names = [*wide.narrow, *wide.moments]
        divided = [name for name in names if wide.slicing.owned(name) is not None]
        specs = {name: (self._narrow(name).dtype, self._stored_shape(name)) for name in divided}
        self.stored = _scratch(specs)  # parts of divided tensors; their memory is a file
        self.whole = {n: t for n, t in wide.narrow.items() if n not in self.stored}
        self.bytes_sent = 0  # of slices, to others
        for name, tensor in self.stored.items():
            if name in wide.narrow:  # moments begin as zeros, as the file does
                dim, _, _ = self._slicing.owned_side(name)
                entries = wide.slicing.owned_entries(name, across_teams.size, across_teams.rank)
                wide.fill(tensor, name, {dim: entries})
        for name, tensor in self.whole.items():
            wide.fill(tensor, name, {})

    def take(self, chosen: Sequence[Channels]) -> None:
        """Fill the sub-models with their slices, given the channels of each."""
        own = chosen[self.across_teams.rank]
        self.wide.choose(own)
        for names in self._batches():
            cut = [[_picked(self.stored[n], self._to_cut(n, c)) for n in names] for c in chosen]
            targets = [[self._in_slice(n, own, rank) for n in names] for rank in self._ranks]
            for name, index, piece in self._swapped(cut, names, targets):
                ((dim, entries),) = index.items()
                self._narrow(name).index_copy_(dim, entries.to(piece.device), piece)

    def give(self, chosen: Sequence[Channels]) -> None:
        """Put the slices of the sub-models back, and average their whole tensors."""
        own = chosen[self.across_teams.rank]
        for names in self._batches():
            cut = [
                [_picked(self._narrow(n), self._in_slice(n, own, rank)) for n in names]
                for rank in self._ranks
            ]
            targets = [[self._to_cut(n, channels) for n in names] for channels in chosen]
            for name, index, piece in self._swapped(cut, names, targets):
                entries = [index.get(dim) for dim in range(piece.dim())]
                mapped.put_entries(self.stored[name], piece.cpu(), entries)
        self._average_whole()

    def _narrow(self, name: str) -> Tensor:
        wide = self.wide
        return wide.narrow[name] if name in wide.narrow else wide.moments[name]

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        dim, _, _ = self._slicing.owned_side(name)
        shape = list(self.wide.shapes[name])
        shape[dim] //= self.across_teams.size
        return tuple(shape)

    def _shared(self, size: int, channels: Tensor, rank: int) -> tuple[int, int]:
        """Return the first of a sub-model's channels that a rank stores, and the one after them."""
        stored = block(size, self.across_teams.size, rank)
        ends = torch.searchsorted(channels, torch.tensor([stored.start, stored.stop]))
        first, end = ends.tolist()
        return first, end

    def _to_cut(self, name: str, channels: Channels) -> Index:
        """Return which entries of a stored tensor belong to a sub-model's slice."""
        owned, side, size = self._slicing.owned_side(name)
        rank, num = self.across_teams.rank, self.across_teams.size
        of_group = channels[side.group]
        first, end = self._shared(size, of_group, rank)
        here = of_group[first:end] - block(size, num, rank).start
        index = {owned: side.entries(here, size // num)}
        for dim, other in enumerate(self._slicing.sides[name]):
            if other is not None and dim != owned:
                index[dim] = other.entries(channels[other.group], self._slicing.sizes[other.group])
        return index

    def _in_slice(self, name: str, channels: Channels, rank: int) -> Index:
        """Return which entries of a sub-model's tensor a rank stores."""
        dim, side, size = self._slicing.owned_side(name)
        first, end = self._shared(size, channels[side.group], rank)
        return {dim: side.entries(torch.arange(first, end), size // self.across_teams.size)}

    def _swapped(
        self,
        cut: Sequence[Sequence[Tensor]],
        names: Sequence[str],
        targets: Sequence[Sequence[Index]],
    ) -> Iterator[tuple[str, Index, Tensor]]:
        """Send each rank its pieces; yield name, target and piece for those that it sends."""
        shapes = [
            [self._shape(name, index) for name, index in zip(names, indices, strict=True)]
            for indices in targets
        ]
        device = self._narrow(names[0]).device
        flat = [torch.cat([piece.flatten().to(device) for piece in pieces]) for pieces in cut]
        sizes = [sum(map(math.prod, of_rank)) for of_rank in shapes]
        received = self.across_teams.swap(flat, sizes)
        own = flat[self.across_teams.rank].nbytes
        self.bytes_sent += sum(part.nbytes for part in flat) - own
        for flat_pieces, of_rank, indices in zip(received, shapes, targets, strict=True):
            pieces = flat_pieces.split([math.prod(shape) for shape in of_rank])
            for name, index, shape, piece in zip(names, indices, of_rank, pieces, strict=True):
                yield name, index, piece.view(shape)

    def _shape(self, name: str, index: Index) -> tuple[int, ...]:
        shape = list(self._narrow(name).shape)
        for dim, entries in index.items():
            shape[dim] = len(entries)
        return tuple(shape)

    def _batches(self) -> Iterator[list[str]]:
        """Yield the names of tensors of one dtype whose slices are exchanged together."""
        batch, numbers = [], 0
        for name in self.stored:
            tensor = self._narrow(name)
            is_other = bool(batch) and tensor.dtype != self._narrow(batch[0]).dtype
            if batch and (is_other or numbers + tensor.numel() > _NUMBERS_AT_ONCE):
                yield batch
                batch, numbers = [], 0
            batch.append(name)
            numbers += tensor.numel()
        if batch:
            yield batch

    def _average_whole(self) -> None:
        """Take the mean of the tensors that are whole in all sub-models.

        The variance of values that are spread over the sub-models is the mean of their variances
        plus the variance of their means.
        """
        moments = {n: t for n, t in self.wide.moments.items() if n not in self.stored}
        tensors = {n: t for n, t in (self.whole | moments).items() if t.is_floating_point()}
        if not tensors or self.across_teams.size == 1:
            return
        variances = {n: tensors.pop(n) for n in [*tensors] if n.endswith(_VARIANCE)}
        means = {n: self.whole[n.removesuffix(_VARIANCE) + _MEAN] for n in variances}
        own = {n: mean.clone() for n, mean in means.items()}
        self._average([*tensors.values()])
        for name, variance in variances.items():
            variance.add_((own[name] - means[name]).square())
        self._average([*variances.values()])

    def _average(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        exchange = Exchange(self.across_teams)
        one = torch.ones((), dtype=torch.float64, device=tensors[0].device)
        means, _ = exchange.mean(tensors, one)
        self.bytes_sent += exchange.bytes_sent
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean)


def _scratch(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Map a new file that nobody else sees: it is gone once nothing refers to its tensors."""
    parent = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(prefix="vigpipe-") as folder:
            return mapped.create(Path(folder) / "rows.safetensors", specs)
    except OSError as error:
        needed = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values())
        advice = "set TMPDIR to a folder on a larger disk"
        if any(map(is_moment, specs)):
            advice += ", or leave --carry-moments out"
        raise InputError(
            f"{parent}: cannot hold the {needed / 1e6:,.1f} MB that a rank stores of the wide "
            f"model ({error.strerror or error}); {advice}"
        ) from error


def _picked(tensor: Tensor, index: Index) -> Tensor:
    """Return some entries of a tensor, without making anything as long as one of its sides."""
    if len(index) == 1:
        ((dim, entries),) = index.items()
        return tensor.index_select(dim, entries.to(tensor.device))
    entries = [index[d] if d in index else torch.arange(n) for d, n in enumerate(tensor.shape)]
    return tensor[tuple(torch.meshgrid(*entries, indexing="ij"))]


def put_part(target: Tensor, whole: Tensor, index: Index) -> None:
    """Copy entries along one dimension of a mapped tensor, or all of them, to a target.

    Nothing is made that is as long as another side of the tensor.
    """
    if not index:
        target.copy_(whole)
        return
    ((dim, entries),) = index.items()
    lengths = {other: n for other, n in enumerate(whole.shape) if other != dim}
    if not lengths:
        target.copy_(whole[entries])
        return
    longest = max(lengths, key=lambda other: lengths[other])
    for first in range(0, lengths[longest], _COLUMNS_AT_ONCE):
        count = min(_COLUMNS_AT_ONCE, lengths[longest] - first)
        columns = whole.narrow(longest, first, count).index_select(dim, entries)
        target.narrow(longest, first, count).copy_(columns)
