"""Bytes of the tensors that exist at a time."""

import torch

from vigpipe.profiling.live_bytes import LiveBytes


def test_a_storage_counts_once_and_while_something_refers_to_it():
    outside = torch.zeros(1000)
    with LiveBytes() as live:
        a = torch.zeros(1000)
        assert live.now == 4000
        view = a[10:20].view(2, 5)
        assert live.now == 4000
        b = a + outside  # which was there before
        assert (live.now, live.peak) == (8000, 8000)
        del a, b
        assert live.now == 4000
        del view
        assert (live.now, live.peak) == (0, 8000)
        live.add([outside, outside[5:]])
        assert live.now == 4000
