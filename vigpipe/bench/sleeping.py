"""A model that sleeps as long as a measured one computes, with tensors of the true sizes.

What costs a core in a real stage costs none here, so that many stages fit on few cores:

    forward    features are made (touched, so that sending them is as real as it can be), then the
               rank sleeps until the profiled time is over
    backward   the same, with the gradient of the input
    weights    as many bytes as the real ones, never touched; they get no gradient, because
               what that costs is in the profiled time, but the replicas add up all of it
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vigpipe.planning.profile import Piece, Profile

NUM_CLASSES = 2  # of the logits; the loss on them is the only thing computed
NUMBER_BYTES = 4  # float32


def sleep_until(deadline: float) -> float:
    """Sleep until time.perf_counter() reads deadline; at once if it has passed.

    Returns:
        Seconds past the deadline on waking up.
    """
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)
    return -left


class SleepingModel(nn.Module):
    """Stands where `vigpipe.parallel.split.Cuttable` does; a sample's features are a flat vector.

    Args:
        profile: what the pieces cost.
        microbatch_size: samples of a micro-batch, at which the profile is read for the sizes of
            boundaries.
        scale: what the profiled seconds are multiplied by.

    Attributes:
        late_seconds: of every sleep since it was last emptied, how late it ended.
    """

    def __init__(self, profile: Profile, microbatch_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.profile, self.microbatch_size, self.scale = profile, microbatch_size, scale
        self.num_classes = NUM_CLASSES
        self.span = (0, len(profile.blocks))
        self.has_stem, self.has_readout = True, True
        self.recompute = False  # the profile knows whether backwards contain forwards
        self.late_seconds: list[float] = []
        pieces = {"stem": profile.stem, "readout": profile.readout}
        pieces |= {str(i): block for i, block in enumerate(profile.blocks)}
        # At least one number each, or a stage of a block without weights had nothing to add up.
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(max(1, piece.parameter_bytes // NUMBER_BYTES)))
                for name, piece in pieces.items()
            }
        )
        # Autograd runs the backward of a stage only if something in it wants a gradient; the
        # images do not. No parameter, so that nobody waits for its gradient.
        self.root = torch.zeros((), requires_grad=True)

    def boundary_shape(self, block: int) -> tuple[int, ...]:
        """Shape of what one sample hands to a block, or to the readout."""
        giver = self.profile.blocks[block - 1] if block else self.profile.stem
        size = (
            self.profile.at(giver.boundary_bytes, self.microbatch_size)
            / self.microbatch_size
            / NUMBER_BYTES
        )
        return (max(1, round(size)),)

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything but these blocks, and the stem and the readout if they are wanted."""
        kept = list(blocks)
        self.span = (kept[0], kept[-1] + 1)
        self.has_stem, self.has_readout = stem, readout
        names = {*map(str, kept), *["stem"] * stem, *["readout"] * readout}
        for name in set(self.weights) - names:
            del self.weights[name]

    @property
    def pieces(self) -> list[Piece]:
        """What is present, in order."""
        first, end = self.span
        return [
            *[self.profile.stem] * self.has_stem,
            *self.profile.blocks[first:end],
            *[self.profile.readout] * self.has_readout,
        ]

    def forward_seconds(self, num_samples: int) -> float:
        """What a forward of so many samples sleeps."""
        return self.scale * sum(self.profile.at(p.forward, num_samples) for p in self.pieces)

    def backward_seconds(self, num_samples: int) -> float:
        """What a backward of so many samples sleeps."""
        return self.scale * sum(self.profile.at(p.backward, num_samples) for p in self.pieces)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        """(b, ...) -> (b, n): zeros, after the profiled seconds."""
        return _Sleep.apply(x, self.root, self)  # pyright: ignore[reportReturnType]

    def output_shape(self, num_samples: int) -> tuple[int, ...]:
        """Shape of what `forward` gives."""
        if self.has_readout:
            return (num_samples, self.num_classes)
        return (num_samples, *self.boundary_shape(self.span[1]))

    def zeros_after(self, start: float, seconds: float, shape: tuple[int, ...]) -> Tensor:
        """Zeros of a shape, `seconds` after `start` on time.perf_counter()."""
        # Not torch.zeros: that leaves it to the first reader to touch the memory.
        values = torch.empty(shape).zero_()
        self.late_seconds.append(sleep_until(start + seconds))
        return values


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root: Tensor, model: SleepingModel) -> Tensor:  # noqa: ANN401
        start = time.perf_counter()
        ctx.model, ctx.shape = model, x.shape
        return model.zeros_after(start, model.forward_seconds(len(x)), model.output_shape(len(x)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:  # noqa: ANN401
        start = time.perf_counter()
        num_samples = ctx.shape[0]
        gradient = ctx.model.zeros_after(start, ctx.model.backward_seconds(num_samples), ctx.shape)
        return (gradient if ctx.needs_input_grad[0] else None), None, None
