"""Random masks that depend only on seed, step, block and sample, not on cut, rank or device.

The generator is counter-based: a sample's key is a hash of the seed, the step and its position in
the global batch, and every mask hashes that key with its own stream number. No state is kept, so
every rank that computes a mask, however often, gets the same bits. The hash is the output function
of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) in wrapping 64-bit integer
arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vigpipe.ops.masked import dropped
from vigpipe.ops.sparse_rows import SparseRows
from vigpipe.ops.splitmix import GOLDEN, mixed, shifted, signed, some_lanes_at_least

Rows = TypeVar("Rows", Tensor, SparseRows)

PADDING = -1  # the key of a padding row, which holds no sample


def sample_keys(seed: int, step: int, positions: Tensor) -> Tensor:
    """Hash the run's seed, the step and each sample's position in the global batch to a key.

    Positions and keys are (B,) int64. A key is negative, PADDING, only where its position is.
    """
    run = mixed(torch.tensor(signed(seed + GOLDEN)))
    key = mixed(mixed(run + signed(step * GOLDEN)) + positions * signed(GOLDEN))
    return torch.where(positions < 0, PADDING, shifted(key, 1))


def fresh_keys(x: Tensor) -> Tensor:
    """Draw keys from torch's own generator, for training without vigpipe's trainer."""
    return torch.randint(2**62, (x.shape[0],), device=x.device)


def uniform(keys: Tensor, stream: int, num: int = 1) -> Tensor:
    """Draw `num` multiples of 2^-53 in [0, 1) for each key: (B,) int64 -> (B, num) float64."""
    return _numbers(keys[:, None], stream * (1 << 32) + torch.arange(num, device=keys.device))


def _numbers(keys: Tensor, counters: Tensor) -> Tensor:
    bits = mixed(mixed(keys + signed(GOLDEN)) ^ (counters * signed(GOLDEN)))
    return shifted(bits, 11).to(torch.float64) * 2.0**-53


def pair_keys(first: Tensor, second: Tensor) -> Tensor:
    """Make the key of each ordered pair of keys: two times (B,) int64 -> (B,) int64."""
    return mixed(mixed(first + signed(GOLDEN)) + second * signed(GOLDEN))


class KeyedMask(nn.Module):
    """A random mask in training mode, which depends on the samples' keys.

    The rate is the probability that something is left out; every mask of a model has a stream
    number of its own. A mask that is on raises ValueError if there are no draws.
    """

    def __init__(self, rate: float, stream: int) -> None:
        super().__init__()
        self.rate, self.stream = rate, stream

    @property
    def is_on(self) -> bool:
        return self.training and self.rate > 0.0

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3g}, stream={self.stream}"


class ChannelDropout(KeyedMask):
    """Dropout of single channels of wide rows, four of which share a 64-bit hash.

    Whether channel c is kept depends on the row's key, stream, c and rate only, not on the number
    of channels. The rate is rounded to a multiple of 2^-16, and stays below 1.
    """

    fused = True

    def forward(self, x: Rows, draws: "Draws | None") -> Rows:
        """Apply the mask: (B, C) -> (B, C); channels that remain are divided by 1 - rate."""
        if not self.is_on:
            return x
        return self.masked(x, _needed(draws).keys)

    def masked(self, x: Rows, keys: Tensor) -> Rows:
        """Apply the mask of these keys, (B,), to x, (B, C)."""
        rows, stream = mixed(keys.to(x.device) + signed(GOLDEN)), self.stream << 32
        # The rate is rounded: this is the least lane that is kept, and the factor of what is kept.
        num_dropped = min(round(self.rate * (1 << 16)), (1 << 16) - 1)
        threshold, scale = num_dropped - (1 << 15), 1.0 / (1.0 - num_dropped / (1 << 16))
        if isinstance(x, Tensor):
            return dropped(x, rows, stream, threshold, scale, fused=self.fused)  # pyrefly: ignore[bad-return]
        kept = some_lanes_at_least(rows, stream, x.places.targets, x.places.indices, threshold)
        return SparseRows(x.places, x.values * kept * scale)  # pyrefly: ignore[bad-return]


class KeyedDropout(KeyedMask):
    """Dropout of single numbers."""

    def forward(self, x: Tensor, draws: "Draws | None") -> Tensor:
        """Apply the mask: (B, ...) -> (B, ...); numbers that remain are divided by 1 - rate."""
        if not self.is_on:
            return x
        kept = uniform(_needed(draws).keys.to(x.device), self.stream, x[0].numel()) >= self.rate
        return x * (kept.to(x.dtype) / (1.0 - self.rate)).view(x.shape)


class DropPath(KeyedMask):
    """Drop-path, arXiv:1603.09382: half of a block is left out for some samples."""

    def forward(self, x: Tensor, draws: "Draws | None") -> Tensor | None:
        """Return the factors, (B,), of samples before the residual, x, is added; None for 1."""
        if not self.is_on:
            return None
        draws = _needed(draws)
        assert draws.scales is not None
        return draws.scales[draws.streams.index(self.stream)].to(x.dtype)


class Draws(NamedTuple):
    """All random choices for some samples: their keys, and the drop-path of every half block.

    Hashing the few numbers of a single block takes some thirty small operators. So `draw` hashes
    the masks of all blocks at once, and a trainer does so on the host for a whole step.
    """

    keys: Tensor  # sample keys, (B,) int64
    scales: Tensor | None  # factors of the samples, (drop-paths, B); None without drop-path
    streams: tuple[int, ...]  # of each drop-path

    def part(self, start: int, end: int) -> "Draws":
        scales = None if self.scales is None else self.scales[:, start:end]
        return Draws(self.keys[start:end], scales, self.streams)

    def sent(self, send: Callable[[Tensor], Tensor]) -> "Draws":
        """Return these draws on another device, where one call of `send` copies a tensor."""
        if self.scales is None:
            return Draws(send(self.keys), None, ())
        # One message carries both: the factors travel as the bits of float64, which hold them.
        rows = torch.cat((self.keys[None], self.scales.double().view(torch.int64)))
        keys, scales = send(rows).split((1, len(self.scales)))
        return Draws(keys[0], scales.view(torch.float64).to(self.scales.dtype), self.streams)


def draw(keys: Tensor, drop_paths: Sequence[DropPath], dtype: torch.dtype) -> Draws:
    """Hash all drop-paths for keys, (B,), to factors of a dtype no narrower than the features."""
    if not drop_paths:
        return Draws(keys, None, ())
    streams = tuple(drop_path.stream for drop_path in drop_paths)
    counters = torch.tensor(streams, dtype=torch.int64, device=keys.device) * (1 << 32)
    rates = [[drop_path.rate] for drop_path in drop_paths]
    rate = torch.tensor(rates, dtype=torch.float64, device=keys.device).view(-1, 1)
    kept = _numbers(keys, counters[:, None]) >= rate
    return Draws(keys, kept.to(dtype) / (1.0 - rate).to(dtype), streams)


def _needed(draws: Draws | None) -> Draws:
    if draws is None:
        raise ValueError("dropout in training mode needs the samples' keys: model(x, keys)")
    return draws
