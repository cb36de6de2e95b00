"""Clocks of a rank's device, and how far the ranks' clocks are apart."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.world import run_ranks
from vigpipe.timing import clock as module
from vigpipe.timing.clock import (
    ClockReading,
    CudaClock,
    HostClock,
    clock_error,
    make_clock,
    on_rank_0,
    read_clocks,
)

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
    before = time.perf_counter()
    (reading,) = read_clocks()
    assert before <= reading.at <= time.perf_counter()
    assert (reading.offset, reading.error) == (0.0, 0.0)
    later = ClockReading(reading.at + 60, 0.0, 0.0)
    assert on_rank_0(reading.at + 7, reading, later) == reading.at + 7


def readings_of_skewed_clocks(rank, world_size):
    real = time.perf_counter
    time.perf_counter = lambda: real() + AHEAD_SECONDS[rank]
    try:
        return read_clocks()
    finally:
        time.perf_counter = real


@pytest.mark.multiprocess
def test_offsets_of_skewed_clocks_are_found_within_the_stated_error():
    by_rank = run_ranks(readings_of_skewed_clocks, len(AHEAD_SECONDS))
    assert by_rank[1] == by_rank[0]
    assert by_rank[2] == by_rank[0]
    for reading, ahead in zip(by_rank[0], AHEAD_SECONDS, strict=True):
        # The ranks share one true clock; a float64 of seconds holds it to some 1e-9.
        assert abs(reading.offset - ahead) <= reading.error + 1e-8
        assert abs(reading.at - ahead - by_rank[0][0].at) < 60
    assert by_rank[0][0][1:] == (0.0, 0.0)
    assert all(0 < reading.error < 0.5 for reading in by_rank[0][1:])


class _Exchange:
    """Rank 0's side of exchanges with a rank that has a clock of its own.

    Questions take (there, back) seconds, which differ from one exchange to the next.
    """

    def __init__(self, monkeypatch, delays, rate=1.0):
        self.now, self.delays, self.rate = 100.0, iter(delays), rate
        distributed = SimpleNamespace(
            is_initialized=lambda: True,
            get_world_size=lambda: 2,
            get_rank=lambda: 0,
            send=self.send,
            recv=self.recv,
            broadcast=lambda *args, **options: None,
        )
        monkeypatch.setattr(module, "dist", distributed)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def clock(self, now):
        """The other rank's, when rank 0's shows `now`."""
        return 10.0 + self.rate * now

    def send(self, box, other):
        self.there, self.back = next(self.delays)
        self.now += self.there

    def recv(self, box, other):
        box[0] = self.clock(self.now)
        self.now += self.back


DELAYS = [(0.5, 0.1), (0.03, 0.01)] + [(0.2, 0.6)] * (module.NUM_EXCHANGES - 2)


def test_the_fastest_exchange_decides_and_its_half_bounds_the_error(monkeypatch):
    _Exchange(monkeypatch, DELAYS)
    own, other = read_clocks()
    assert own == (100.0, 0.0, 0.0)
    assert other.error == pytest.approx(0.02)
    # An error of half the difference of there and back.
    assert other.offset == pytest.approx(10.01, rel=1e-12)
    assert abs(other.offset - 10) <= other.error
    assert other.at == pytest.approx(110 + 0.6 + 0.03, rel=1e-12)


def test_times_of_a_clock_that_drifts_agree_with_rank_0_within_the_stated_error(monkeypatch):
    """Offsets were read once, at the end of a run.

    A clock that runs 1e-4 fast gains 0.36 s in an hour, so the spans of steps that were timed at
    the start lay that much too late beside those of rank 0, with a stated error of microseconds.
    """
    exchange = _Exchange(monkeypatch, [*DELAYS, *reversed(DELAYS)], rate=1 + 1e-4)
    first = read_clocks()
    started = exchange.now
    exchange.now += 3600
    ended = exchange.now
    last = read_clocks()
    error = clock_error(first, last)
    assert error == pytest.approx(0.02, rel=1e-3)
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        when = started + share * (ended - started)
        assert abs(on_rank_0(exchange.clock(when), first[1], last[1]) - when) <= error
        assert on_rank_0(when, first[0], last[0]) == when
    by_the_last_alone = exchange.clock(started) - last[1].offset
    assert abs(by_the_last_alone - started) > 0.3


def test_the_error_between_two_ranks_is_that_of_both():
    first = [ClockReading(0.0, 0.0, error) for error in (0.0, 1e-5, 4e-5, 2e-5)]
    last = [ClockReading(9.0, 0.0, error) for error in (0.0, 3e-5, 1e-5, 2e-5)]
    assert clock_error(first, last) == pytest.approx(4e-5 + 3e-5)
    assert clock_error(first[:1], last[:1]) == 0


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
