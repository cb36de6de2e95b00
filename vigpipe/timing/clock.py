"""Read the time of a rank's work, and measure how far the clocks of the ranks are apart."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

NUM_EXCHANGES = 20


class HostClock:
    """The clock of a CPU, whose work is done when a call returns.

    Stamps and marks of a clock are cheap, and are turned into seconds later: a stamp until the next
    step begins, a mark at any time.
    """

    def __init__(self) -> None:
        self.stamp = self.mark = time.perf_counter

    def begin(self) -> None:
        """Begin a step; called before its first stamp, when the device is idle."""

    def finish(self) -> None:
        """Wait until the device has reached the last stamp of the step."""

    def seconds(self, stamp: float) -> float:
        """Return when, on this host's `time.perf_counter`, the device reached a stamp."""
        return stamp

    def between(self, first: float, last: float) -> float:
        """Return the seconds from one mark to another; the device must have reached both."""
        return last - first


class CudaClock:
    """The clock of a GPU: events on the current stream, which the host does not wait for.

    The time of an event is only known relative to another event, in float32 milliseconds. So every
    step begins with an event of its own, at a moment when the device is idle and the host's clock
    gives its time.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def begin(self) -> None:
        self._used = 0
        self._first_seconds = time.perf_counter()
        self._first = self.stamp()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def stamp(self) -> torch.cuda.Event:
        # The events of earlier steps are used again.
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        return self._first_seconds + self._first.elapsed_time(stamp) / 1e3

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1e3


Clock = HostClock | CudaClock


class Lap(NamedTuple):
    """The times of one step; read them when the device has done the step."""

    clock: Clock
    began: Any
    marks: list[Any]  # when each forward and backward began and ended
    ended: Any

    def seconds(self) -> float:
        return self.clock.between(self.began, self.ended)

    def busy_seconds(self) -> float:
        """Return the durations of all forwards and backwards together."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return sum(self.clock.between(began, ended) for began, ended in pairs)


class Stopwatch:
    """Times a step, and in it what is done between entering and leaving."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._began, self._marks = self._clock.mark(), []

    def lap(self) -> Lap:
        """End the step, and return its times."""
        return Lap(self._clock, self._began, self._marks, self._clock.mark())

    def __enter__(self) -> None:
        self._marks.append(self._clock.mark())

    def __exit__(self, *_: object) -> None:
        self._marks.append(self._clock.mark())


def make_clock(device: torch.device) -> Clock:
    """Make the clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class ClockReading(NamedTuple):
    """How far a rank's `time.perf_counter` was ahead of rank 0's at one moment; all in seconds."""

    at: float  # the moment, on the rank's own clock
    offset: float
    error: float  # a bound of the offset's error


def read_clocks() -> list[ClockReading]:
    """Compare every rank's `time.perf_counter` with rank 0's; all ranks call this together.

    Rank 0 asks each rank for the time and takes it to be that of the middle of the fastest of
    NUM_EXCHANGES exchanges: Cristian 1989, "Probabilistic clock synchronization", section 3. Half
    of that exchange bounds the error. All ranks get the same list of all readings.
    """
    now = time.perf_counter()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [ClockReading(now, 0.0, 0.0)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    readings = torch.zeros(world_size, 3, dtype=torch.float64)  # on the host, so gloo sends it
    readings[0, 0] = now
    box = torch.zeros(1, dtype=torch.float64)
    for other in range(1, world_size):
        if rank == other:
            for _ in range(NUM_EXCHANGES):
                dist.recv(box, 0)
                box[0] = time.perf_counter()
                dist.send(box, 0)
        elif rank == 0:
            answers: list[tuple[float, float, float]] = []
            for _ in range(NUM_EXCHANGES):
                asked = time.perf_counter()
                dist.send(box, other)
                dist.recv(box, other)
                answered = time.perf_counter()
                at = float(box)
                answers.append(((answered - asked) / 2, at, at - (asked + answered) / 2))
            error, at, offset = min(answers)
            readings[other] = torch.tensor([at, offset, error], dtype=torch.float64)
    dist.broadcast(readings, 0)
    return [ClockReading(*reading) for reading in readings.tolist()]


def on_rank_0(seconds: float, first: ClockReading, last: ClockReading) -> float:
    """Translate a time of a rank's clock to that of rank 0, between two readings of that rank.

    Clocks of two hosts run at slightly different rates, so the offset is interpolated linearly
    between the readings. Between them, the error is at most the larger of theirs as long as the
    rates do not change; how much a change of the rates adds is not known.
    """
    share = (seconds - first.at) / (last.at - first.at)
    return seconds - (first.offset + share * (last.offset - first.offset))


def clock_error(first: Sequence[ClockReading], last: Sequence[ClockReading]) -> float:
    """Bound how far the times of one event on two ranks may be apart after `on_rank_0`, in seconds.

    The readings are by rank. Two ranks may err in opposite directions, so the bound is the sum of
    the two largest errors. It holds for clocks whose rates do not change between the readings.
    """
    bounds = [max(a.error, b.error) for a, b in zip(first, last, strict=True)]
    return sum(sorted(bounds)[-2:])
