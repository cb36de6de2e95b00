"""A hash of 64-bit integers, and the masks of wide rows that it decides.

The hash is the output function of SplitMix64 (Steele, Lea, Flood 2014,
doi:10.1145/2660193.2660195) in wrapping 64-bit integer arithmetic.
"""

import torch
from torch import Tensor

from vigpipe.ops.call import call, can_call, num_threads, sizes

GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def signed(value: int) -> int:
    """Return the int64 that has the lowest 64 bits of a number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, and zeros in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # >> on int64 repeats the sign bit; mask it away


def mixed(x: Tensor) -> Tensor:
    """Hash int64 numbers, of any shape."""
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def lanes_at_least(
    rows: Tensor, first: int, num: int, threshold: int, *, fused: bool = True
) -> Tensor:
    """Compare four lanes of 16 bits of every hash with a threshold.

    Channel c of a row is lane c % 4, the lowest first, of the hash of the row's number and of the
    counter first + c // 4. The numbers of rows, (B,) int64, are hashes themselves. The threshold is
    from -2^15, which all lanes attain, to 2^15 - 1. For `num` channels the result is (B, num) bool.
    """
    if fused and can_call(rows):
        kept = rows.new_empty(len(rows), num, dtype=torch.bool)
        shape = sizes(first, threshold, len(rows), num)
        call("lanes_at_least", rows.contiguous(), kept, *shape, num_threads(kept.numel()))
        return kept
    counters = first + torch.arange((num + 3) // 4, device=rows.device)
    # A tensor without elements that an operator makes may have a stride of 0, which no view takes.
    bits, spare = rows.new_empty((2, len(rows), len(counters)))
    torch.bitwise_xor(rows[:, None], counters * signed(GOLDEN), out=bits)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):  # `mixed`, in place
        torch.bitwise_right_shift(bits, shift, out=spare)
        bits.bitwise_xor_(spare.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            bits.mul_(signed(factor))
    return bits.view(torch.int16)[:, :num] >= threshold


def some_lanes_at_least(
    rows: Tensor, first: int, places: Tensor, channels: Tensor, threshold: int
) -> Tensor:
    """Compare some of the lanes that `lanes_at_least` compares, (e,) bool.

    Lane k is that of channel channels[k], (e,) int64, in row places[k], (e,) int64.
    """
    bits = mixed(rows[places] ^ ((first + channels // 4) * signed(GOLDEN)))
    lanes = (bits >> (channels % 4 * 16)).to(torch.int16)  # the lowest 16 bits
    return lanes >= threshold
