"""What timing itself costs."""

import time

import torch

from vigpipe.timing import cost
from vigpipe.timing.clock import HostClock
from vigpipe.timing.cost import stamp_seconds

CPU = torch.device("cpu")


def test_a_slow_clock_shows(monkeypatch):
    monkeypatch.setattr(cost, "NUM_REPEATS", 3)
    monkeypatch.setattr(cost, "NUM_REGIONS", 4)

    class Slow(HostClock):
        def __init__(self):
            def stamp():
                time.sleep(5e-4)
                return time.perf_counter()

            self.stamp = stamp  # pyrefly: ignore[bad-assignment, bad-override]

    assert 4e-4 < stamp_seconds(Slow(), CPU) < 5e-2
