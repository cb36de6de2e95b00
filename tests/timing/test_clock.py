"""Clocks of a rank's device, and how far the ranks' clocks are apart."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.world import run_ranks
from vigpipe.timing import clock as module
from vigpipe.timing.clock import CudaClock, HostClock, clock_offsets, make_clock

# Of every rank, before rank 0's clock. Hosts count from when they were started, which may be weeks
# apart, and float32 holds such an offset to a sixteenth of a second: it went through one once.
AHEAD_SECONDS = (0.0, 5.0, -1234567.8)


def test_a_cpu_works_while_it_is_called():
    clock = make_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.begin()
    before = time.perf_counter()
    stamp = clock.stamp()
    clock.finish()
    assert before <= clock.seconds(stamp) <= time.perf_counter()


def test_a_process_alone_has_no_offset():
    assert clock_offsets() == [(0.0, 0.0)]


def offsets_of_skewed_clocks(rank, world_size):
    real = time.perf_counter
    time.perf_counter = lambda: real() + AHEAD_SECONDS[rank]
    try:
        return clock_offsets()
    finally:
        time.perf_counter = real


@pytest.mark.multiprocess
def test_offsets_of_skewed_clocks_are_found_within_the_stated_error():
    by_rank = run_ranks(offsets_of_skewed_clocks, len(AHEAD_SECONDS))
    assert by_rank[1] == by_rank[0]
    assert by_rank[2] == by_rank[0]
    for (offset, error), ahead in zip(by_rank[0], AHEAD_SECONDS, strict=True):
        # The ranks share one true clock; a float64 of seconds holds it to some 1e-9.
        assert abs(offset - ahead) <= error + 1e-8
    assert by_rank[0][0] == (0.0, 0.0)
    assert all(0 < error < 0.5 for _, error in by_rank[0][1:])


class _Exchange:
    """Rank 0's side of exchanges with a rank whose clock is 10 s ahead, on a clock of its own.

    Questions take (there, back) seconds, which differ from one exchange to the next.
    """

    def __init__(self, delays):
        self.now, self.delays = 100.0, iter(delays)

    def perf_counter(self):
        return self.now

    def send(self, box, other, group):
        self.there, self.back = next(self.delays)
        self.now += self.there

    def recv(self, box, other, group):
        box[0] = self.now + 10.0
        self.now += self.back


def test_the_fastest_exchange_decides_and_its_half_bounds_the_error(monkeypatch):
    exchange = _Exchange([(0.5, 0.1), (0.03, 0.01)] + [(0.2, 0.6)] * (module.NUM_EXCHANGES - 2))
    distributed = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: 0,
        get_backend=lambda: "gloo",
        send=exchange.send,
        recv=exchange.recv,
        broadcast=lambda *args, **options: None,
        group=SimpleNamespace(WORLD=object()),
        ProcessGroup=object,
    )
    monkeypatch.setattr(module, "dist", distributed)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=exchange.perf_counter))
    own, (offset, error) = clock_offsets()
    assert own == (0.0, 0.0)
    assert error == pytest.approx(0.02)
    assert offset == pytest.approx(10.01)  # an error of half the difference of there and back
    assert abs(offset - 10) <= error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.gpu
def test_events_tell_when_the_gpu_got_there():
    clock = make_clock(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    x = torch.rand(2048, 2048, device="cuda")
    for _ in range(2):  # events are used again
        torch.cuda.synchronize()
        clock.begin()
        start = time.perf_counter()
        first = clock.stamp()
        for _ in range(50):
            x = x @ x
            x = x / x.norm()
        asked = time.perf_counter()
        last = clock.stamp()
        clock.finish()
        end = time.perf_counter()
        assert start - 0.01 <= clock.seconds(first) <= clock.seconds(last) <= end + 0.001
        assert clock.seconds(last) > asked - 0.01  # not when it was asked to, but when it had done
        assert clock.seconds(last) - clock.seconds(first) > 0
