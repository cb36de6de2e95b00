"""Write the page about an emulated cluster: headline, tables, rows and picture."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

import torch
from tabulate import tabulate

from benchmarks.options import EmulateBench
from benchmarks.overhead import (
    MeasuredLayout,
    Overhead,
    TimedStep,
    by_case,
    fit_overhead,
    select_layouts,
)
from vigpipe.planning.profile import Profile, write_profile
from vigpipe.run.provenance import origin

PICTURE = "overhead.png"
COLUMNS = (
    "seconds",
    "schedule_seconds",
    "sync_seconds",
    "late_seconds",
    "cpu_seconds",
    "memory_bytes",
)


def write_page(
    folder: Path,
    options: EmulateBench,
    profile: Profile,
    steps: Sequence[TimedStep],
    alone: Sequence[float],
) -> None:
    """Print the tables; write README.md, rows.csv, overhead.png and profile.json.

    Args:
        folder: folder to write to.
        options: options of the benchmark.
        profile: profile whose seconds the ranks slept.
        steps: timed steps of all layouts.
        alone: seconds by which sleeps of a lone rank ended late.
    """
    measured = by_case(steps)
    sizes = sorted({m.case.microbatch_size for m in measured})
    question = (
        f"{profile.model}, {len(profile.blocks)} blocks, cut evenly, micro-batches of "
        f"{' or '.join(map(str, sizes))} samples, {options.schedule}, --sync {options.sync}. Ranks "
        f"sleep {options.scale:g} × the profiled time instead of computing; schedule, tensors, "
        "gloo transfers and all-reduce are real. Ideal: (M − 1)(max f + max b) + Σf + Σb over the "
        "stages, exact for gpipe and, where stages are equal, for 1f1b."
    )
    remarks = [headline(measured), *caveats(measured, alone)]

    def text(fmt: str) -> str:
        tables = layout_table(measured, fmt), sync_table(measured, fmt)
        return "\n\n".join(filter(None, (question, *remarks, *tables)))

    print(f"{text('simple')}\n")
    draw(folder / PICTURE, measured)
    write_profile(profile, folder / "profile.json")
    _write_rows(folder / "rows.csv", steps)
    measured_on = "; ".join(f"{name} {value}" for name, value in profile.facts.items())
    (folder / "README.md").write_text(
        f"# An emulated cluster\n\n{text('github')}\n\n![step against ideal](overhead.png)\n\n"
        f"{origin(torch.device('cpu'), 'ranks of one thread')}"
        f"- profile: profile.json, measured on {measured_on or 'unknown'}\n"
        "- the clock covers the schedule and adding gradients up, not the optimizer; a step lasts "
        f"as long as its slowest rank; {options.repeats} rounds over all layouts, one step for "
        "warm-up before each timed one\n",
        encoding="utf-8",
    )
    print(f"{folder}/README.md, rows.csv, overhead.png, profile.json")


def headline(measured: Sequence[MeasuredLayout]) -> str:
    """Say what a micro-batch and a transfer cost, and how well that explains the steps."""
    overhead = fit_overhead(measured)
    if overhead is None:
        return (
            "Overhead of a micro-batch and of a transfer: not told apart; that needs three layouts "
            "of several stages, such as --stages 2,4 --microbatches 4,8."
        )
    microbatch = _with_error(overhead.microbatch_seconds, overhead.microbatch_error)
    transfer = _with_error(overhead.transfer_seconds, overhead.transfer_error)
    late = 2 * mean(m.fastest("late_seconds") for m in select_layouts(measured))
    return (
        f"**Overhead: {microbatch} a micro-batch "
        f"(forward and backward, of which {late * 1e6:.0f} µs is waking up late), "
        f"{transfer} a transfer** of "
        f"{_kilobytes(measured)}. {_fit_quality(overhead)}"
    )


def _fit_quality(overhead: Overhead) -> str:
    return (
        f"Least squares over the fastest repeats of {overhead.num_layouts} layouts of 2 to "
        f"{overhead.most_ranks} ranks, of several stages and the fewest replicas: schedule − ideal "
        "= a × (M + S − 1) + b × 2 (S − 1), the "
        "micro-batches and the transfers on the critical path; it leaves "
        f"{overhead.residual_seconds * 1e3:.2f} ms (root mean square) of at most "
        f"{overhead.largest_seconds * 1e3:.2f} ms unexplained; ± is the standard error."
    )


def _with_error(seconds: float, error: float) -> str:
    return f"{seconds * 1e6:.0f} ± {error * 1e6:.0f} µs"


def _kilobytes(measured: Sequence[MeasuredLayout]) -> str:
    sizes = sorted({m.case.transfer_bytes for m in select_layouts(measured)})
    least, most = sizes[0] / 1e3, sizes[-1] / 1e3
    return f"{most:.0f} kB" if least == most else f"{least:.0f} – {most:.0f} kB"


def caveats(measured: Sequence[MeasuredLayout], alone: Sequence[float]) -> list[str]:
    """Say how exact sleeping is, what memory the ranks took, and where cores were short."""
    late = [1e6 * m.median("late_seconds") for m in measured]
    cores = os.cpu_count() or 1
    largest = max(measured, key=lambda m: m.case.layout.world_size)
    memory = largest.median("memory_bytes")
    texts = [
        f"A sleep of a lone rank ends {median(alone) * 1e6:.0f} µs late (median; 95 % within "
        f"{quantiles(alone, n=20)[-1] * 1e6:.0f} µs); in the timed steps it is {min(late):.0f} – "
        f"{max(late):.0f} µs by layout. {largest.case.layout.world_size} ranks took "
        f"{memory / 1e9:.2f} GB together, {memory / largest.case.layout.world_size / 1e6:.0f} MB "
        "each (shared pages counted once)."
    ]
    if short := [m for m in measured if m.is_short_of_cores]:
        ranks = min(m.case.layout.world_size for m in short)
        texts.append(
            f"Rows with * kept more than half of the {cores} cores at work, so ranks waited for a "
            f"core, too: schedule, copies and all-reduce of {ranks} and more ranks share them. On "
            "a cluster, where each rank has its own, these steps would be nearer to the ideal."
        )
    return texts


def layout_table(measured: Sequence[MeasuredLayout], fmt: str) -> str:
    """Make a table with one row per layout: step, ideal step, bubble and synchronisation."""
    rows = []
    for m in measured:
        layout, seconds = m.case.layout, [1e3 * step.seconds for step in m.steps]
        rows.append(
            (
                layout.pipeline_size,
                layout.num_microbatches,
                f"{layout.num_replicas}{' *' * m.is_short_of_cores}",
                f"{median(seconds):.1f}",
                f"{min(seconds):.1f} – {max(seconds):.1f}",
                f"{1e3 * m.case.ideal_seconds:.1f}",
                f"{m.ratio:.3f}",
                f"{m.case.bubble:.1%}",
                f"{m.bubble:.1%}",
                f"{1e3 * m.median('sync_seconds'):.2f}",
                f"{1e6 * m.median('late_seconds'):.0f}",
                f"{m.busy_cores:.2f}",
            )
        )
    headers = [
        "S", "M", "D", "step, ms (median)", "min – max", "ideal, ms", "step / ideal",
        "bubble: (S−1)/(M+S−1)", "measured", "adding up, ms", "a sleep is late, µs", "busy cores",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True)


def sync_table(measured: Sequence[MeasuredLayout], fmt: str) -> str:
    """Make a table of how adding up gradients grows with D; empty if no layout has replicas."""
    rows = []
    for stages, replicas, seconds, size in synchronisation(measured):
        if replicas > 1:
            sent = 2 * (replicas - 1) / replicas * size
            total = stages * replicas * sent
            rows.append(
                (
                    stages,
                    replicas,
                    f"{size / 1e6:.2f}",
                    f"{sent / 1e6:.2f}",
                    f"{total / 1e6:.1f}",
                    f"{1e3 * seconds:.2f}",
                    f"{sent / seconds / 1e6:.0f}",
                    f"{total / seconds / 1e6:.0f}",
                )
            )
    if not rows:
        return ""
    headers = [
        "S", "D", "added up by a rank, MB", "sent by a rank, MB", "by all, MB", "ms (median)",
        "MB/s of a rank", "MB/s of all",
    ]  # fmt: skip
    note = (
        "Adding gradients up, over all M: the buffer of the largest stage, of which a ring sends "
        "2 (D − 1)/D; the time is the slowest rank's, waiting for other replicas included.\n\n"
    )
    return note + tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True)


def synchronisation(measured: Sequence[MeasuredLayout]) -> list[tuple[int, int, float, int]]:
    """List (S, D, median seconds of adding up, bytes of the largest buffer) over all M."""
    steps: dict[tuple[int, int], list[TimedStep]] = {}
    for m in measured:
        degrees = m.case.layout.pipeline_size, m.case.layout.num_replicas
        steps.setdefault(degrees, []).extend(m.steps)
    return [
        (*degrees, median(step.sync_seconds for step in same), same[0].sync_bytes)
        for degrees, same in sorted(steps.items())
    ]


def _write_rows(path: Path, steps: Sequence[TimedStep]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        counts = ["stages", "microbatches", "replicas", "rows", "transfer_bytes", "sync_bytes"]
        rows.writerow([*counts, "repeat", "ideal_seconds", *COLUMNS])
        for step in steps:
            case, layout = step.case, step.case.layout
            degrees = (layout.pipeline_size, layout.num_microbatches, layout.num_replicas)
            sizes = (case.microbatch_size, case.transfer_bytes, step.sync_bytes)
            values = [getattr(step, name) for name in COLUMNS]
            rows.writerow([*degrees, *sizes, step.repeat, case.ideal_seconds, *values])


def draw(path: Path, measured: Sequence[MeasuredLayout]) -> None:
    """Draw the step against the ideal one by S and by M, and synchronisation by D."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_stages, by_microbatches, by_replicas = figure.subplots(1, 3)
    fewest = min(m.case.layout.num_replicas for m in measured)
    chosen = [m for m in measured if m.case.layout.num_replicas == fewest]
    all_stages = sorted({m.case.layout.pipeline_size for m in chosen})
    all_microbatches = sorted({m.case.layout.num_microbatches for m in chosen})
    for number in all_microbatches:
        same = [m for m in chosen if m.case.layout.num_microbatches == number]
        stages = [m.case.layout.pipeline_size for m in same]
        by_stages.plot(stages, [m.ratio for m in same], "o-", label=f"M = {number}")
    by_stages.axhline(1, color="0.6", lw=1)
    by_stages.set(xlabel="stages S", ylabel=f"step / ideal step (D = {fewest})")
    for i, number in enumerate(all_stages):
        same = [m for m in chosen if m.case.layout.pipeline_size == number]
        counts = [m.case.layout.num_microbatches for m in same]
        seconds = [1e3 * m.median("seconds") for m in same]
        by_microbatches.plot(counts, seconds, "o", color=f"C{i}", label=f"S = {number}")
        ideal = [1e3 * m.case.ideal_seconds for m in same]
        by_microbatches.plot(counts, ideal, "--", lw=1, color=f"C{i}")
    by_microbatches.set(xlabel="micro-batches M", ylabel="step, ms (dashed: ideal)", ylim=(0, None))
    points = synchronisation(measured)
    for number in all_stages:
        curve = [(d, 1e3 * seconds) for s, d, seconds, _ in points if s == number]
        by_replicas.plot(*zip(*curve, strict=True), "o-", label=f"S = {number}")
    by_replicas.set(xlabel="replicas D", ylabel="adding gradients up, ms", ylim=(0, None))
    all_replicas = sorted({m.case.layout.num_replicas for m in measured})
    ticks = all_stages, all_microbatches, all_replicas
    for axes, numbers in zip((by_stages, by_microbatches, by_replicas), ticks, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
