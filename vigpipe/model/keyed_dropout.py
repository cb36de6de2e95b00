"""Random masks that depend only on seed, step, block and sample, not on cut, rank or device.

The generator is counter-based: a sample's key is a hash of the seed, the step and its position in
the global batch, and every mask hashes that key with its own stream number. No state is kept, so
every rank that computes a mask, however often, gets the same bits. The hash is the output function
of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) in wrapping 64-bit integer
arithmetic.
"""

import torch
from torch import Tensor, nn

PADDING = -1  # the key of a padding row, which holds no sample
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # >> on int64 repeats the sign bit; mask it away


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def sample_keys(seed: int, step: int, positions: Tensor) -> Tensor:
    """Compute one key per sample.

    Args:
        seed: the run's seed.
        step: index of the optimizer step.
        positions: (B,) int64, positions in the global batch; negative marks padding.

    Returns:
        (B,) int64, non-negative; PADDING where the position is negative.
    """
    run = _mixed(torch.tensor(_signed(seed + _GOLDEN)))
    key = _mixed(_mixed(run + _signed(step * _GOLDEN)) + positions * _signed(_GOLDEN))
    return torch.where(positions < 0, PADDING, _shifted(key, 1))


def fresh_keys(x: Tensor) -> Tensor:
    """Draw keys from torch's own generator, for training without vigpipe's trainer."""
    return torch.randint(2**62, (x.shape[0],), device=x.device)


def uniform(keys: Tensor, stream: int, num: int = 1) -> Tensor:
    """Draw uniform numbers in [0, 1), `num` for each key.

    Args:
        keys: sample keys, (B,) int64.
        stream: stream number, which is different for every mask of the model.
        num: how many numbers to draw per key.

    Returns:
        (B, num) float64, each a multiple of 2^-53.
    """
    counter = stream * (1 << 32) + torch.arange(num, device=keys.device)
    bits = _mixed(_mixed(keys[:, None] + _signed(_GOLDEN)) ^ (counter * _signed(_GOLDEN)))
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


class KeyedDropout(nn.Module):
    """Dropout whose mask is keyed by sample.

    Args:
        rate: probability that a number (or, with `whole_sample`, a whole sample) is set to zero.
        stream: stream number, which is different for every mask of the model.
        whole_sample: drop all numbers of a sample together, which is drop-path, arXiv:1603.09382.
    """

    def __init__(self, rate: float, stream: int, whole_sample: bool = False) -> None:
        super().__init__()
        self.rate, self.stream, self.whole_sample = rate, stream, whole_sample

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Apply the mask: (B, ...) -> (B, ...); numbers that remain are divided by 1 - rate."""
        sample_scale = self.sample_scale(x, keys)
        if sample_scale is None:
            return x
        return x * sample_scale.view(
            (len(x), *[1] * (x.dim() - 1)) if self.whole_sample else x.shape
        )

    def sample_scale(self, x: Tensor, keys: Tensor | None) -> Tensor | None:
        """Return the factors that `forward` multiplies by: 0 or 1 / (1 - rate).

        Args:
            x: features, (B, ...).
            keys: sample keys, (B,) int64; may be None where no mask is needed.

        Returns:
            (B, numbers per sample), or (B,) with `whole_sample`; None, which stands for 1, in
            evaluation mode or at rate 0.

        Raises:
            ValueError: a mask is needed and there are no keys.
        """
        if not self.training or self.rate == 0.0:
            return None
        if keys is None:
            raise ValueError("dropout in training mode needs the samples' keys: model(x, keys)")
        num = 1 if self.whole_sample else x[0].numel()
        mask = uniform(keys.to(x.device), self.stream, num) >= self.rate
        mask = mask.squeeze(1) if self.whole_sample else mask
        return mask.to(x.dtype) / (1.0 - self.rate)

    def extra_repr(self) -> str:
        """Show rate, stream and kind of mask."""
        return f"rate={self.rate:.3g}, stream={self.stream}, whole_sample={self.whole_sample}"
