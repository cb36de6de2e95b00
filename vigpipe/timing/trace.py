"""Write a trace of all ranks for chrome://tracing and ui.perfetto.dev.

Format: Google's "Trace Event Format", complete events ("ph": "X") in microseconds. A process of the
trace is a replica, a thread a rank; the regions of the model nest inside the spans by their times.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vigpipe.timing.recorder import RecordedStep


def write_trace(
    steps: Mapping[int, Sequence[RecordedStep]],
    replica_of: Mapping[int, int],
    clock_error_seconds: float,
    path: Path,
) -> None:
    """Write trace.json from the recorded steps by rank, all on one clock.

    Each rank has a replica; the error is how far the times of one event on two ranks may be apart.
    """
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
                times = _times(span.start - begin, span.end - begin)
                args = {"step": step.step, "phase": step.phase, "stage": span.stage}
                events.append(
                    {"ph": "X", "cat": "span", "name": name, **thread, **times, "args": args}
                )
            # Where several begin together, the outermost comes first, as viewers expect.
            for event in sorted(step.events, key=lambda event: (event.start, -event.end)):
                kind = {"cat": event.direction, "name": event.name}
                times = _times(event.start - begin, event.end - begin)
                args = {"step": step.step, "microbatch": event.microbatch}
                events.append({"ph": "X", **kind, **thread, **times, "args": args})
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock_error_microseconds": 1e6 * clock_error_seconds},
    }
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")


def _times(start: float, end: float) -> dict[str, float]:
    """Convert to microseconds, so that spans that touched each other still do after rounding."""
    begins, ends = round(1e6 * start, 3), round(1e6 * end, 3)
    return {"ts": begins, "dur": round(ends - begins, 3)}
