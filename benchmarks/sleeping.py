"""A model that sleeps as long as a measured one computes, with tensors of the true sizes.

Sleeping needs hardly any core, so that many stages fit on few cores:

    forward    the features are made, with their memory touched so that sending them is real, and
               the rank sleeps until the profiled time is over
    backward   the same happens with the gradient of the input
    weights    they have as many bytes as the real ones, but are never touched and get no gradient,
               because that is part of the profiled time; the replicas add up buffers of full size
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vigpipe.model.keyed_dropout import Draws, draw
from vigpipe.planning.profile import Piece, Profile

AWAKE_SECONDS = 0.5e-3  # at the end of a sleep
NUM_CLASSES = 2  # of the logits; the loss on them is the only thing computed
NUMBER_BYTES = 4  # float32


def sleep_until(deadline: float) -> float:
    """Sleep until time.perf_counter() reads `deadline`; return at once if it has passed.

    The last AWAKE_SECONDS are spent awake, for a core that has slept is slow at first, and one that
    computes would not have.

    Returns:
        Seconds past the deadline at the end.
    """
    while (left := deadline - time.perf_counter()) > 0:
        if left > AWAKE_SECONDS:
            time.sleep(left - AWAKE_SECONDS)
    return -left


class SleepingModel(nn.Module):
    """A model that sleeps, in the place of a `vigpipe.parallel.split.Cuttable`.

    The features of a sample are a flat vector.

    Args:
        profile: costs of the model's pieces.
        microbatch_size: samples in a micro-batch, at which the profile gives the boundary bytes.
        scale: factor that the profiled seconds are multiplied by.

    Attributes:
        late_seconds: by how many seconds each sleep ended late, since the list was last emptied.
    """

    def __init__(self, profile: Profile, microbatch_size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.profile, self.scale = profile, scale
        self.microbatch_size = microbatch_size
        self.num_classes, self.num_heads = NUM_CLASSES, 1
        self.span = (0, len(profile.blocks))
        self.has_stem, self.has_readout = True, True
        self.recompute = False  # the profile knows whether backwards contain forwards
        self.is_leading, self.follows_leading = False, True  # every piece is trained
        self.late_seconds: list[float] = []
        pieces = {"stem": profile.stem, "readout": profile.readout}
        pieces |= {str(i): block for i, block in enumerate(profile.blocks)}
        # Each has at least one number, so that a stage whose block has no weights has something to
        # add up.
        self.weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(max(1, piece.parameter_bytes // NUMBER_BYTES)))
                for name, piece in pieces.items()
            }
        )
        # Autograd runs the backward of a stage only if something in it requires a gradient, and the
        # images do not. This is not a parameter, so that no one waits for its gradient.
        self.root = torch.zeros((), requires_grad=True)

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of one sample's features where they enter a block, or the readout."""
        sender = self.profile.blocks[block - 1] if block else self.profile.stem
        microbatch_bytes = self.profile.at(sender.boundary_bytes, self.microbatch_size)
        return ((max(1, round(microbatch_bytes / self.microbatch_size / NUMBER_BYTES)),),)

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything but the pieces of one stage.

        Args:
            blocks: indices of the blocks to keep, consecutive.
            stem: whether to keep the stem.
            readout: whether to keep the readout.
        """
        indices = list(blocks)
        self.span = (indices[0], indices[-1] + 1)
        self.has_stem, self.has_readout = stem, readout
        self.follows_leading = stem
        names = {*map(str, indices), *["stem"] * stem, *["readout"] * readout}
        for name in set(self.weights) - names:
            del self.weights[name]

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that have been kept, in order."""
        first, end = self.span
        return [
            *[self.profile.stem] * self.has_stem,
            *self.profile.blocks[first:end],
            *[self.profile.readout] * self.has_readout,
        ]

    def forward_seconds(self, num_samples: int) -> float:
        """Return the seconds that the forward of so many samples sleeps."""
        return self.scale * sum(self.profile.at(p.forward, num_samples) for p in self.pieces)

    def backward_seconds(self, num_samples: int) -> float:
        """Return the seconds that the backward of so many samples sleeps."""
        return self.scale * sum(self.profile.at(p.backward, num_samples) for p in self.pieces)

    def draw(self, keys: Tensor, dtype: torch.dtype) -> Draws:
        """Draw nothing: sleep is not random."""
        return draw(keys, (), dtype)

    def forward(self, x: Tensor, keys: Draws | None) -> Tensor:
        """Return zeros after the profiled seconds: (B, ...) -> `output_shape(B)`."""
        return _Sleep.apply(x, self.root, self)

    def output_shape(self, num_samples: int) -> tuple[int, ...]:
        """Return the shape of the result of `forward` for so many samples."""
        if self.has_readout:
            return (num_samples, self.num_classes)
        return (num_samples, *self.boundary_shapes(self.span[1])[0])

    def zeros_after(self, start: float, seconds: float, shape: tuple[int, ...]) -> Tensor:
        """Make zeros and sleep until a time.

        Args:
            start: time in seconds on time.perf_counter().
            seconds: how long after `start` the sleep ends.
            shape: shape of the zeros.
        """
        # torch.zeros would leave it to the first reader to touch the memory.
        values = torch.empty(shape).zero_()
        self.late_seconds.append(sleep_until(start + seconds))
        return values


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, root: Tensor, model: SleepingModel) -> Tensor:
        start = time.perf_counter()
        ctx.model, ctx.shape = model, x.shape
        return model.zeros_after(start, model.forward_seconds(len(x)), model.output_shape(len(x)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        start = time.perf_counter()
        seconds = ctx.model.backward_seconds(ctx.shape[0])
        gradient = ctx.model.zeros_after(start, seconds, ctx.shape)
        return (gradient if ctx.needs_input_grad[0] else None), None, None
