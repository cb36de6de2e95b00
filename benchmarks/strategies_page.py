"""Write the page about ways to agree: what was asked, tables, rows and picture."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate

from benchmarks.options import StrategiesBench
from vigpipe.files.atomic import save_figure
from vigpipe.run.provenance import origin, this_command

PICTURE = "strategies.png"
# Zhang 2021: time of AllReduce-GCN over that of GossipGCN, for TAU 1, 20, 100.
PUBLISHED = {
    "Reddit, 4 GPUs": (1.28, 1.20, 1.29),
    "Reddit, 8 GPUs": (1.06, 1.36, 1.77),
    "Amazon, 4 GPUs": (1.40, 1.53, 1.53),
    "Amazon, 8 GPUs": (1.04, 1.43, 1.81),
}
BASE, BEST = "all, fixed", "pair, pool"


@dataclass(frozen=True)
class Case:
    """A way to agree on a kind of machines."""

    machine: str  # a kind of machines, such as "one slow"
    way: str  # a way to agree, such as "pair, pool"
    average_every: int  # TAU; 0 if nothing is averaged


@dataclass(frozen=True)
class CaseRun:
    """A case that was run."""

    case: Case
    repeat: int  # which time it was
    seconds: float  # until the last replica had ended
    busy: Sequence[float]  # seconds of work of each replica
    waiting: Sequence[float]  # seconds for which each replica has waited for others
    averaging: Sequence[float]  # seconds of each replica's averages
    items: Sequence[int]  # of each replica
    num_bytes: int  # that all replicas have sent, and the server if there is one
    expected_bytes: int  # that they should send by the formula


class Cases:
    """The runs of a benchmark, case by case.

    Args:
        runs: all runs.

    Attributes:
        runs: all runs.
        machines: the kinds of machines.
        ways: in which replicas are averaged.
        served: in which a server applies their gradients; these have no interval.
        intervals: TAU.
    """

    def __init__(self, runs: Sequence[CaseRun]) -> None:
        self.runs = runs
        self._runs: dict[tuple[str, str, int], list[CaseRun]] = {}
        for run in runs:
            case = run.case
            self._runs.setdefault((case.machine, case.way, case.average_every), []).append(run)
        self.machines = tuple(dict.fromkeys(machine for machine, _, _ in self._runs))
        self.ways = tuple(dict.fromkeys(way for _, way, every in self._runs if every))
        self.served = tuple(dict.fromkeys(way for _, way, every in self._runs if not every))
        self.intervals = tuple(dict.fromkeys(every for _, _, every in self._runs if every))

    def of(self, machine: str, way: str, average_every: int) -> list[CaseRun]:
        """Return the runs of a case, in the order of the repeats."""
        return self._runs[machine, way, 0 if way in self.served else average_every]

    def ratios(self, machine: str, slow: str, fast: str, average_every: int) -> list[float]:
        """Return how many times faster one way is than another, repeat by repeat."""
        pairs = zip(
            self.of(machine, slow, average_every),
            self.of(machine, fast, average_every),
            strict=True,
        )
        return [first.seconds / second.seconds for first, second in pairs]


def share(run: CaseRun, seconds: Sequence[float]) -> float:
    """Return which share of the time of all replicas some of their seconds are."""
    return sum(seconds) / (len(seconds) * run.seconds)


def write_page(folder: Path, options: StrategiesBench, runs: Sequence[CaseRun]) -> None:
    """Print the tables; write README.md, rows.csv and the picture.

    Args:
        folder: folder to write to.
        options: options of the benchmark.
        runs: all runs.
    """
    cases = Cases(runs)
    question = (
        f"{options.dp} replicas do {options.items} items together and average {options.numbers:,} "
        f"numbers ({options.average}). An item takes {1e3 * options.seconds:g} ms of sleep; table, "
        "exchanges and averages are real. equal: all replicas are; one slow: the last one takes 4 "
        "times as long; spells: each is 4 times slower for 10 items at times. all: every replica "
        "is averaged with all others (--strategy periodic); pair: with one other (gossip). "
        "overlap: an average travels for a quarter of TAU. server: one more rank applies each "
        "gradient as it comes."
    )

    def text(fmt: str) -> str:
        tables = (f"{machine}:\n\n{_table(cases, machine, fmt)}" for machine in cases.machines)
        return "\n\n".join([question, _headline(cases), *tables, _published(cases, fmt)])

    print(f"{text('simple')}\n")
    _draw(folder / PICTURE, cases, options)
    _write_rows(folder / "rows.csv", runs)
    (folder / "README.md").write_text(
        f"# Ways in which replicas agree\n\n{text('github')}\n\n![time and waiting]({PICTURE})"
        f"\n\n{origin(torch.device('cpu'), 'replicas of one thread')}"
        f"- {options.repeats} rounds over all cases; medians; ratios are taken round by round; the "
        "clock runs until the last replica has ended\n",
        encoding="utf-8",
    )
    print(f"{folder}/README.md, rows.csv, {PICTURE}")


def _headline(cases: Cases) -> str:
    """Say how much faster the pool and gossip are when one replica is slow, and who waits."""
    sentences = []
    for every in cases.intervals:
        ratio = median(cases.ratios("one slow", BASE, BEST, every))
        pool = median(cases.ratios("one slow", BASE, "all, pool", every))
        waits = median(share(run, run.waiting) for run in cases.of("one slow", BEST, every))
        sentences.append(
            f"TAU {every}: {ratio:.2f}× with pairs and a pool ({waits:.0%} waiting), {pool:.2f}× "
            "with the pool alone"
        )
    first = cases.intervals[0]
    for way in cases.served:
        ratio = median(cases.ratios("one slow", BASE, way, first))
        sentences.append(f"{way}: {ratio:.2f}× (against TAU {first})")
    exact = all(run.num_bytes == run.expected_bytes for run in cases.runs)
    sent = (
        "The bytes sent are those of the formulas in every run: 2 (D − 1) / D · 4 P a replica and "
        "average of all, 4 P in a pair, 4 P each way for an item with a server; with bfloat16 half "
        "of that, with top-k 8 k (D − 1)."
        if exact
        else "NOT all bytes are those of the formulas; see rows.csv."
    )
    return (
        f"**With one slow replica, against an average of all with fixed items: "
        f"{'; '.join(sentences)}.** {sent}"
    )


def _table(cases: Cases, machine: str, fmt: str) -> str:
    rows = []
    averaged = [(every, way) for every in cases.intervals for way in cases.ways]
    served = [(cases.intervals[0], way) for way in cases.served]
    for every, way in averaged + served:
        runs = cases.of(machine, way, every)
        seconds = [run.seconds for run in runs]
        ratios = cases.ratios(machine, BASE, way, every)
        rows.append(
            (
                "–" if way in cases.served else every,
                way,
                f"{median(seconds):.2f}",
                f"{min(seconds):.2f} – {max(seconds):.2f}",
                f"{median(ratios):.2f}×",
                f"{min(ratios):.2f} – {max(ratios):.2f}",
                _percent(runs, lambda run: run.waiting),
                _percent(runs, lambda run: run.averaging),
                " ".join(map(str, runs[0].items)),
                f"{median(run.num_bytes for run in runs) / 1e6:.1f}",
            )
        )
    headers = [
        "TAU", "way", "seconds", "min – max", f"ratio to {BASE}", "min – max", "waiting",
        "averaging", "items (first round)", "MB sent",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True)


def _percent(runs: Sequence[CaseRun], seconds: Callable[[CaseRun], Sequence[float]]) -> str:
    return f"{median(share(run, seconds(run)) for run in runs):.1%}"


def _published(cases: Cases, fmt: str) -> str:
    """Put the published ratios beside those that were measured here."""
    intervals = [every for every in cases.intervals if every in (1, 20, 100)]
    if not intervals:
        return ""
    rows = [
        (
            f"Zhang 2021, {name}",
            *(f"{ratios[(1, 20, 100).index(every)]:.2f}" for every in intervals),
        )
        for name, ratios in PUBLISHED.items()
    ]
    for way in ("pair, pool", "pair, pool, interval"):
        for machine in cases.machines:
            measured = [f"{median(cases.ratios(machine, BASE, way, e)):.2f}" for e in intervals]
            rows.append((f"here, {way}, {machine}", *measured))
    headers = ["AllReduce time / gossip time", *(f"TAU {every}" for every in intervals)]
    note = (
        "Published for GraphSAGE, with averaged gradients, on 8 GPUs that were shared with other "
        "jobs:\n\n"
    )
    return note + tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True)


def _write_rows(path: Path, runs: Sequence[CaseRun]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["machine", "way", "average_every", "repeat", "seconds", "num_bytes", "expected_bytes"]
            + [f"{name}_{r}" for name in _EACH for r in range(len(runs[0].items))]
        )
        for run in runs:
            case = run.case
            each = [value for name in _EACH for value in getattr(run, name)]
            numbers = (run.repeat, run.seconds, run.num_bytes, run.expected_bytes)
            rows.writerow([case.machine, case.way, case.average_every, *numbers, *each])


_EACH = ("items", "busy", "waiting", "averaging")


def _draw(path: Path, cases: Cases, options: StrategiesBench) -> None:
    """Draw how the replicas' time divides into work, averages and waiting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(cases.machines), sharey=True, squeeze=False)[0]
    kinds = ("busy", "averaging", "waiting")
    colours = {"busy": "C0", "averaging": "C1", "waiting": "0.8"}
    names = {"busy": "working", "averaging": "averaging", "waiting": "waiting"}
    width = 0.8 / len(cases.ways)
    columns = [(every, cases.ways) for every in cases.intervals] + [(0, cases.served)]
    for axes, machine in zip(all_axes, cases.machines, strict=True):
        for i, (every, ways) in enumerate(columns):
            for j, way in enumerate(ways):
                runs, bottom = cases.of(machine, way, every), 0.0
                x = i + (j - (len(ways) - 1) / 2) * width
                for kind in kinds:
                    height = median(sum(getattr(run, kind)) / options.dp for run in runs)
                    label = names[kind] if i == j == 0 else None
                    axes.bar(x, height, width * 0.9, bottom, color=colours[kind], label=label)
                    bottom += height
                if i in (0, len(cases.intervals)):
                    axes.text(x, bottom, f" {way}", rotation=90, ha="center", va="bottom", size=8)
        ticks = [*(f"TAU {every}" for every in cases.intervals), "server"]
        axes.set_xticks(range(len(columns)), ticks)
        axes.set_title(machine)
        axes.grid(axis="y", alpha=0.3)
    all_axes[0].set_ylabel("seconds of a replica (mean)")
    all_axes[0].margins(y=0.45)
    all_axes[-1].legend()
    save_figure(figure, path, this_command(), dpi=120)
