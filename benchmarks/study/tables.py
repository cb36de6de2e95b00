"""Make the tables of the experiment: measured figures beside published and simulated ones."""

from collections.abc import Sequence
from dataclasses import astuple
from statistics import median

from tabulate import tabulate

from benchmarks.study.configs import (
    BATCH,
    BLOCK_SECONDS,
    READOUT_SECONDS,
    SEQUENTIAL,
    STEP_SECONDS,
    baseline,
    ceiling,
    name_of,
    published_speedup,
)
from benchmarks.study.outcome import Outcome
from vigpipe.analysis.bubble import ideal_bubble
from vigpipe.timing.recorder import PHASES
from vigpipe.timing.tables import statistics

NONE = "–"


def step_table(outcome: Outcome, fmt: str = "github") -> str:
    """Make the table of step seconds: measured, published and simulated."""
    lines = []
    for name, layout in outcome.layouts.items():
        s = statistics(outcome.pooled_seconds(name, "train"))
        lines.append(
            (
                name,
                _ranks(outcome, name),
                _number(STEP_SECONDS.get(name), ".2f"),
                *(f"{x:.4f}" for x in (s.mean, s.std, s.min, s.max, s.median)),
                str(s.count),
                f"{outcome.predictions[name].apart_seconds:.4f}" if layout.world_size > 1 else NONE,
            )
        )
    headers = ["layout", "ranks", f"published, B = {BATCH}", "mean", "std", "min", "max"]
    headers += ["median", "count", "simulated, own cores"]
    return _table(headers, lines, fmt)


def speedup_table(outcome: Outcome, fmt: str = "github") -> str:
    """Make the table of speed-ups over both baselines, with the published one and the ceiling."""
    lines = []
    for name, layout in outcome.layouts.items():
        if name == SEQUENTIAL:
            continue
        base = name_of(baseline(layout))
        is_split = layout.world_size > 1
        lines.append(
            (
                name,
                _ranks(outcome, name),
                _number(published_speedup(name), ".2f", "×"),
                _spread(outcome.ratios(name, SEQUENTIAL)),
                _spread(outcome.ratios(name, base)) if is_split else NONE,
                f"{ceiling(layout):.2f}×" if is_split else NONE,
                f"{outcome.simulated_ratio(name, base):.2f}×" if is_split else NONE,
            )
        )
    if not lines:
        return f"Only {SEQUENTIAL} was run."
    headers = ["layout", "ranks", "published, to the whole", "to the whole mini-batch"]
    headers += ["to the same micro-batches", "ceiling of that", "simulated, own cores"]
    return _table(headers, lines, fmt)


def bubble_table(outcome: Outcome, fmt: str = "github") -> str:
    """Make the table of bubbles (measured and by the formula), predicted steps and peak memory."""
    lines = []
    for name, layout in outcome.layouts.items():
        runs = outcome.runs[name]
        bubbles = [run.bubble for run in runs if run.bubble is not None]
        prediction = outcome.predictions[name]
        measured = median(outcome.pooled_seconds(name, "train"))
        peaks = [max(of_rank) for of_rank in zip(*(run.peak_bytes for run in runs), strict=True)]
        lines.append(
            (
                name,
                _ranks(outcome, name),
                f"{median(bubbles):.1%}" if bubbles else NONE,
                f"{ideal_bubble(layout):.1%}" if layout.pipeline_size > 1 else NONE,
                f"{measured:.4f}",
                f"{prediction.here_seconds:.4f}",
                f"{prediction.here_seconds / measured - 1:+.1%}",
                f"{prediction.apart_seconds:.4f}",
                ", ".join(f"{peak / 1e6:.0f}" for peak in peaks),
            )
        )
    headers = ["layout", "ranks", "bubble", "formula", "step, s", "predicted here", "off by"]
    headers += ["simulated, own cores", "peak of each rank, MB"]
    return _table(headers, lines, fmt)


def block_table(outcome: Outcome, fmt: str = "github") -> str:
    """Make the table of the forward seconds of one block and of the readout, as in the study."""
    lines: list[tuple[str, ...]] = [
        ("published", phase, str(BLOCK_SECONDS[phase]), *[""] * 9) for phase in PHASES
    ]
    lines.append(("published", "", *[""] * 5, str(READOUT_SECONDS), *[""] * 4))
    for name, runs in outcome.runs.items():
        for phase in PHASES:
            cells: list[str] = []
            for pick in ("block_seconds", "readout_seconds"):
                values = [value for run in runs for value in getattr(run, pick)[phase]]
                if values:
                    mean, std, least, most, *_, count = astuple(statistics(values))
                    cells += [f"{x:.4f}" for x in (mean, std, least, most)] + [str(count)]
                else:
                    cells += [NONE] * 5
            lines.append((name, phase, *cells))
    numbers = ["std", "min", "max", "count"]
    headers = ["layout", "phase", "block, mean", *numbers, "readout, mean", *numbers]
    return _table(headers, lines, fmt)


def inference_table(outcome: Outcome, fmt: str = "github") -> str:
    """Make the table of test batches: seconds, latency and throughput by S and M."""
    lines = []
    for name, layout in outcome.layouts.items():
        seconds = outcome.pooled_seconds(name, "test")
        latencies = [1e3 * x for run in outcome.runs[name] for x in run.latency_seconds]
        base = name_of(baseline(layout))
        ratios = outcome.ratios(name, base, "test") if layout.world_size > 1 else []
        lines.append(
            (
                name,
                _ranks(outcome, name),
                *map(str, (layout.pipeline_size, layout.num_microbatches, layout.num_replicas)),
                _spread([1e3 * x for x in seconds], "", ".1f"),
                _spread(latencies, "", ".1f"),
                f"{outcome.batch_size / median(seconds):.1f}",
                _spread(ratios),
            )
        )
    headers = ["layout", "ranks", "S", "M", "D", "mini-batch, ms", "latency, ms", "images/s"]
    headers += ["to the same micro-batches"]
    return _table(headers, lines, fmt)


def _ranks(outcome: Outcome, name: str) -> str:
    number = outcome.layouts[name].world_size
    return f"{number} on {outcome.num_cores} cores" if outcome.is_crowded(name) else str(number)


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return NONE if value is None else f"{value:{spec}}{unit}"


def _spread(values: Sequence[float], unit: str = "×", spec: str = ".2f") -> str:
    if not values:
        return NONE
    middle = f"{median(values):{spec}}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{spec}} – {max(values):{spec}})"


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]], fmt: str) -> str:
    return tabulate(
        lines,
        headers=headers,
        tablefmt=fmt,
        disable_numparse=True,
        colalign=("left", *["right"] * (len(headers) - 1)),
    )
