"""The trace of all ranks: what viewers need to show it."""

import json

import pytest

from vigpipe.spans import Span
from vigpipe.timing.recorder import Event, RecordedStep
from vigpipe.timing.trace import write_trace


def step(rank: int, start: float) -> RecordedStep:
    return RecordedStep(
        "train",
        7,
        [
            Span(rank, "other", start, start + 0.001),
            Span(rank, "forward", start + 0.001, start + 0.004, rank, 2),
        ],
        [
            # In the order in which they ended; the block and its part begin together.
            Event("block 0/ffn", "forward", rank, 2, start + 0.0015, start + 0.002),
            Event("block 0", "forward", rank, 2, start + 0.0015, start + 0.003),
        ],
    )


@pytest.fixture
def trace(tmp_path):
    steps = {0: [step(0, 100.0), step(0, 101.0)], 3: [step(3, 99.5)]}
    write_trace(steps, {0: 0, 3: 1}, 25e-6, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())


def complete(trace) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_times_are_microseconds_since_the_first_rank_began(trace):
    events = complete(trace)
    assert len(events) == 3 * 4
    assert min(event["ts"] for event in events) == 0
    (forward, *_) = [e for e in events if e["tid"] == 0 and e["cat"] == "span" and e["dur"] > 2000]
    assert forward["name"] == "forward 2"
    assert forward["ts"] == pytest.approx(501_000, abs=0.01)
    assert forward["dur"] == pytest.approx(3000, abs=0.01)
    assert forward["args"] == {"step": 7, "phase": "train", "stage": 0}
    block = next(event for event in events if event["name"] == "block 0")
    assert block["cat"] == "forward"
    assert block["args"] == {"step": 7, "microbatch": 2}
    assert trace["otherData"] == {"clock_error_microseconds": pytest.approx(25)}


def test_replicas_are_processes_and_ranks_are_threads(trace):
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 0, 0): "replica 0",
        ("thread_name", 0, 0): "rank 0",
        ("process_name", 1, 3): "replica 1",
        ("thread_name", 1, 3): "rank 3",
    }
    assert {(event["pid"], event["tid"]) for event in complete(trace)} == {(0, 0), (1, 3)}


def test_events_nest_as_viewers_read_them(trace):
    """In the order of time, and of the file where that is equal, each lies in the one it is in."""
    for rank in (0, 3):
        own = sorted((e for e in complete(trace) if e["tid"] == rank), key=lambda e: e["ts"])
        around: list[dict] = []
        depths = []
        for event in own:
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + 1e-6:
                around.pop()
            if around:
                end = around[-1]["ts"] + around[-1]["dur"]
                assert event["ts"] + event["dur"] <= end + 1e-6
            depths.append(len(around))
            around.append(event)
        assert depths == [0, 0, 1, 2] * (len(own) // 4)
