"""Which sides of a model's tensors belong to which channels: one table for each model.

A sub-model of a wide model has some of its channels, and of every tensor the rows and columns that
belong to them. A model says so once (`StagedModel.slicing`); what a sub-model holds, what travels
and what is stored follows from that.

    sizes    the groups of channels that are divided, and how many channels each has
    sides    for every tensor of the state dict, a side for each dimension; None for one that stays
             whole

Channels of one group are drawn together: layers whose outputs are added must have the same ones. A
dimension can hold a channel of a group more than once:

    [x | aggregated], or attention heads      all channels of the group, `repeats` times
    interleaved, [x0, m0, x1, m1, ...]        every channel is `run` neighbouring entries
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vigpipe.errors import InputError

INPUT = "input"  # the group of the channels of a model's input, where they are divided


@dataclass(frozen=True)
class Side:
    """A dimension of a tensor whose entries belong to the channels of a group."""

    group: str
    repeats: int = 1  # how often all channels come, one time after the other
    run: int = 1  # number of neighbouring entries that belong to a channel

    def entries(self, channels: Tensor, num_channels: int) -> Tensor:
        """Return which entries, ascending, belong to some of a group's channels, ascending."""
        firsts = torch.arange(self.repeats) * num_channels
        repeated = (firsts[:, None] + channels).flatten()
        return (repeated[:, None] * self.run + torch.arange(self.run)).flatten()

    def length(self, num_channels: int) -> int:
        """Return the number of entries of a dimension whose group has so many channels."""
        return self.repeats * num_channels * self.run


Sides = tuple[Side | None, ...]
Roles = Mapping[str, tuple[str | None, ...]]  # names of a module's tensors -> a role per dimension

LINEAR_ROLES: Roles = {"weight": ("out", "in"), "bias": ("out",)}
CONV_ROLES: Roles = {"weight": ("out", "in", None, None), "bias": ("out",)}


def within(prefix: str, roles: Roles, renamed: Mapping[str, str] | None = None) -> Roles:
    """Return a module's roles in a module that contains it, where names begin with the prefix."""
    names = renamed or {}
    return {
        prefix + name: tuple(None if role is None else names.get(role, role) for role in dims)
        for name, dims in roles.items()
    }


def bound(
    module: nn.Module, prefix: str, roles: Roles, channels: Mapping[str, Side | None]
) -> dict[str, Sides]:
    """Replace the roles of a module's tensors by sides, None if whole; omit tensors it lacks."""
    present = module.state_dict().keys()
    return {
        prefix + name: tuple(None if role is None else channels[role] for role in dims)
        for name, dims in roles.items()
        if name in present
    }


def divided_width(channels: int, num: int, where: str) -> int:
    """Return how many channels each of `num` sub-models has; InputError names them by `where`."""
    if num < 1 or channels % num:
        raise InputError(
            f"--dp {num}: {num} sub-networks cannot equally share the {channels} channels of "
            f"{where}; choose a divisor of {channels}"
        )
    return channels // num


@dataclass(frozen=True)
class Slicing:
    """The table of a model."""

    sizes: Mapping[str, int]  # number of channels of each group, by its name
    sides: Mapping[str, Sides]  # of each tensor of the state dict, by its name

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], sides: Mapping[str, Sides]) -> "Slicing":
        """Make a table for the state dict of a wide model or a stage of it, maybe on meta."""
        if unlike := sorted(tensors.keys() ^ sides.keys()):
            raise ValueError(f"either no tensor or no sides: {', '.join(unlike)}")
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            for length, side in zip(tensor.shape, sides[name], strict=True):
                if side is None:
                    continue
                size = sizes.setdefault(side.group, length // side.length(1))
                if side.length(size) != length:
                    raise ValueError(
                        f"{name}: a side has {length} entries instead of {side.length(size)}, for "
                        f"the {size} channels of {side.group}"
                    )
        return cls(sizes, sides)

    def shape(self, name: str, whole: tuple[int, ...], num: int) -> tuple[int, ...]:
        """Return the shape of a tensor in each of `num` sub-models; `whole` is the wide model's."""
        pairs = zip(whole, self.sides[name], strict=True)
        return tuple(length if side is None else length // num for length, side in pairs)

    def owned_entries(self, name: str, num: int, owner: int) -> Tensor:
        """Return the entries of an owner's `block` of channels in a tensor's dimension `owned`."""
        _, side, size = self.owned_side(name)
        return side.entries(torch.tensor(block(size, num, owner)), size)

    def owned_side(self, name: str) -> tuple[int, Side, int]:
        """Return the dimension `owned` of a tensor that has a side, that side, and its channels."""
        dim = self.owned(name)
        assert dim is not None
        side = self.sides[name][dim]
        assert side is not None
        return dim, side, self.sizes[side.group]

    def owned(self, name: str) -> int | None:
        """Return the first dimension with a side, which owners divide; None if all store all."""
        return next((i for i, side in enumerate(self.sides[name]) if side is not None), None)


def block(size: int, num: int, owner: int) -> range:
    """Return the channels that one of `num` owners of a group of `size` channels stores."""
    length = size // num
    return range(owner * length, (owner + 1) * length)


def runs(entries: Tensor) -> list[tuple[int, int]]:
    """Return ascending entries as runs of neighbours: the first one, and how many there are."""
    breaks = (entries.diff() != 1).nonzero().flatten() + 1
    pieces = entries.tensor_split(breaks)
    return [(int(piece[0]), len(piece)) for piece in pieces if len(piece)]
