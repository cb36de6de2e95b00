"""Write a trace of all ranks for chrome://tracing and ui.perfetto.dev.

Format: Google's "Trace Event Format", complete events ("ph": "X") in microseconds. A process of the
trace is a replica, a thread a rank; the regions of the model nest inside the spans by their times.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vigpipe.spans import Span
from vigpipe.timing.recorder import Event, RecordedStep


def write_trace(
    steps: Mapping[int, Sequence[RecordedStep]],
    replica_of: Mapping[int, int],
    clock_error_seconds: float,
    path: Path,
) -> None:
    """Write trace.json from the recorded steps by rank, all on one clock; see `clock_error`."""
    begin = min(step.spans[0].start for rank_steps in steps.values() for step in rank_steps)
    events: list[dict[str, Any]] = []
    for rank, rank_steps in steps.items():
        replica = replica_of[rank]
        thread = {"pid": replica, "tid": rank}
        events += [
            {"ph": "M", "name": "process_name", **thread, "args": {"name": f"replica {replica}"}},
            {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank}"}},
        ]
        for step in rank_steps:
            for span in step.spans:
                name = span.kind if span.microbatch < 0 else f"{span.kind} {span.microbatch}"
                kind = {"ph": "X", "cat": "span", "name": name}
                args = {"step": step.step, "phase": step.phase, "stage": span.stage}
                events.append({**kind, **thread, **_times(span, begin), "args": args})
            # Where several begin together, the outermost comes first, as viewers expect.
            for event in sorted(step.events, key=lambda event: (event.start, -event.end)):
                kind = {"ph": "X", "cat": event.direction, "name": event.name}
                args = {"step": step.step, "microbatch": event.microbatch}
                events.append({**kind, **thread, **_times(event, begin), "args": args})
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_microseconds": 1e6 * clock_error_seconds},
    }
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")


def _times(timed: Span | Event, begin: float) -> dict[str, float]:
    """Convert to microseconds, so that spans that touched each other still do after rounding."""
    begins, ends = (round(1e6 * (t - begin), 3) for t in (timed.start, timed.end))
    return {"ts": begins, "dur": round(ends - begins, 3)}
