"""The page and the JSON of a self-test."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from vigpipe.report.markup import escape, paragraph, size, table
from vigpipe.report.style import document
from vigpipe.run.provenance import format_versions
from vigpipe.selftest.machine import Machine
from vigpipe.selftest.rows import Outcome, Part, Row

MARK = '<meta name="generator" content="vigpipe selftest">'
JSON_FORMAT = 1


@dataclass(frozen=True)
class PartResult:
    """The rows of a part, and the seconds it took."""

    part: Part
    rows: Sequence[Row]
    seconds: float


@dataclass(frozen=True)
class Result:
    """A self-test, finished or under way."""

    machine: Machine
    facts: Mapping[str, Any]  # command, commit and versions, as `provenance` gives them
    parts: Sequence[PartResult]  # those that have ended
    budget_seconds: float
    seconds: float

    @property
    def failures(self) -> list[tuple[str, Row]]:
        return [(r.part.name, row) for r in self.parts for row in r.rows if row.outcome == "failed"]


def summary(result: Result) -> str:
    """Say in one paragraph what passed, what failed and what was left out."""
    rows = [row for part in result.parts for row in part.rows]
    text = f"On {result.machine.hardware}: {counts(rows)}, in {result.seconds:.0f} s."
    failures = [f"{name}: {row.what} ({row.note})" for name, row in result.failures]
    if failures:
        text += f" Failed: {'; '.join(failures)}."
    return text


def counts(rows: Sequence[Row]) -> str:
    """Count the rows by their outcomes, in words."""
    numbers = Counter(row.outcome for row in rows)
    words = [f"{numbers[outcome]} {outcome}" for outcome in get_args(Outcome) if numbers[outcome]]
    return ", ".join(words) or "nothing"


def page(result: Result) -> str:
    """Make the HTML of the page, which opens from disk and needs no network."""
    title = f"vigpipe selftest: {result.machine.hardware}"
    style = "warning" if result.failures else "running"
    body = [paragraph(summary(result), style), _origin(result)]
    for part in result.parts:
        body += [f"<h2>{escape(part.part.title)}</h2>"]
        body += [paragraph(f"{counts(part.rows)}, in {part.seconds:.0f} s.", "note")]
        body += part.part.section(part.rows)
    return document(MARK, title, "\n".join(body))


def _origin(result: Result) -> str:
    machine, facts = result.machine, result.facts
    rows = [
        ["command", facts["command"]],
        ["commit", str(facts["commit"])],
        ["date", facts["date"]],
        ["processor", machine.processor],
        ["versions", format_versions({**facts["versions"], **machine.libraries})],
        ["warm-up", facts["warm_up"]],
    ]
    for gpu, number in Counter(machine.gpus).items():
        what = f"{number} × {gpu.name}, {size(gpu.memory_bytes)}, {gpu.num_processors} "
        what += f"multiprocessors, compute capability {gpu.capability}"
        rows.append(["GPUs", what])
    return table(["", ""], rows, style="runs")


def as_json(result: Result) -> str:
    """Write the result as JSON; numbers that JSON has no word for become text."""
    whole = {
        "format": JSON_FORMAT,
        **result.facts,
        "hardware": result.machine.hardware,
        "machine": asdict(result.machine),
        "budget_seconds": result.budget_seconds,
        "seconds": result.seconds,
        "parts": [
            {"name": p.part.name, "seconds": p.seconds, "rows": [asdict(row) for row in p.rows]}
            for p in result.parts
        ],
    }
    return json.dumps(_strict(whole), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value
