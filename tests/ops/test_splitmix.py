"""Lanes of hashes: the C++ version has the bits of the plain one."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vigpipe.ops.splitmix import lanes_at_least

numbers = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(
    st.lists(numbers, max_size=6),
    st.integers(0, 2**40),
    st.integers(0, 600),
    st.integers(-(2**15), 2**15 - 1),
)
@example([], 0, 1, 0)
def test_fused_lanes_are_the_plain_ones(rows, first, num, threshold):
    inputs = (torch.tensor(rows, dtype=torch.int64), first, num, threshold)
    plain, fused = (lanes_at_least(*inputs, fused=fused) for fused in (False, True))
    assert plain.shape == (len(rows), num)
    assert torch.equal(fused, plain)


def test_many_rows_on_several_threads_are_the_plain_ones():
    rows = torch.randint(-(2**62), 2**62, (5000,))
    plain = lanes_at_least(rows, 5 << 32, 70, 100, fused=False)
    for number in (1, 3):
        torch.set_num_threads(number)
        assert torch.equal(lanes_at_least(rows, 5 << 32, 70, 100), plain)
