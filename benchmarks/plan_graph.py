"""Does `vigpipe plan --ranks` choose well? Predict all ways to use some ranks, and measure them."""

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate

from benchmarks.options import PlanGraphBench
from benchmarks.ranks import MAIN
from benchmarks.side_by_side import NUM_WARMUP, alternate
from benchmarks.trained import check_graph_model, check_left_out
from vigpipe.config.choices import SAMPLERS
from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.parallel.values import broadcast_value
from vigpipe.planning.choose_way import Choice, Cluster, choose
from vigpipe.profiling.steps import Steps
from vigpipe.profiling.ways import arrange, list_ways, measure_ways, on_one_rank
from vigpipe.run.facts import Run, prepare
from vigpipe.run.provenance import origin
from vigpipe.start import run_on_ranks

PICTURE = "predicted.png"
NAMES = ("README.md", "rows.csv", PICTURE)
FORM = "MODEL:WIDTHxLAYERS[+SAMPLER*MICROBATCHES][@DATA]"
WITHIN = 0.1  # of the best way, within which a choice is as good
_CALL_SECONDS, _MOST_STEPS, _PARTS = 0.25, 20, 8  # of a timed call; steps of it, at least of parts
_MARKERS = "os^Dv*"
# Okabe and Ito's colours.
_COLOURS = ("black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


class Case(NamedTuple):
    """A model on a graph."""

    name: str  # as the user gave it
    options: dict[str, Any]  # of `vigpipe train`


class Row(NamedTuple):
    """A way of a case."""

    case: str  # its name
    way: str
    options: str  # what to type for it
    is_same: bool  # whether its steps are those of one rank
    is_chosen: bool  # whether it is what the plan says to take
    predicted: float  # seconds of an epoch
    measured: float  # median seconds of an epoch
    least: float  # of the repeats
    most: float  # of the repeats
    predicted_bytes: int  # what ranks that share a graph give one another in a step
    sent_bytes: int  # what they gave


class Verdict(NamedTuple):
    """How good the choice of a case was."""

    case: str  # its name
    chosen: Row  # the way that the plan says to take
    best: Row  # that of least measured seconds, among those with the steps of one rank
    loss: float  # share by which the choice took longer than the best


def parse_cases(text: str, options: TrainConfig) -> list[Case]:
    """Parse the list of cases.

    Args:
        text: of --cases.
        options: have the graph of a case that names none.

    Raises:
        InputError: one has another form, or a model that is not one of graphs.
    """
    cases: list[Case] = []
    pattern = r"(\w+):(\d{1,6})x(\d{1,3})(?:\+([a-z-]+)\*(\d{1,6}))?(?:@(\S+))?"
    for word in filter(None, (word.strip() for word in text.split(";"))):
        found = re.fullmatch(pattern, word)
        if found is None or found[4] not in (None, *SAMPLERS):
            raise InputError(
                f"--cases {word}: must be {FORM}, such as gcn:256x3@sbm:20000,20; cases are "
                "separated by semicolons"
            )
        model, width, layers, sampler, number, data = found.groups()
        check_graph_model(model)
        chosen = {"model": model, "width": int(width), "layers": int(layers)}
        sampling = {"sampler": sampler or "full", "microbatches": int(number or 1)}
        cases.append(Case(word, {**chosen, **sampling, "data": data or options.data}))
    if not cases:
        raise InputError(f"--cases {text}: names none; give some, or leave it out")
    return cases


def run_plan_graph(options: PlanGraphBench, arguments: Sequence[str]) -> int:
    """Start the ranks, or be one of them.

    Args:
        options: of the benchmark.
        arguments: the command line, for the ranks that are started here.

    Returns:
        The exit code.

    Raises:
        InputError: an option is out of range, or one that the benchmark cannot do with.
    """
    _check(options)
    meeting = replace(options, shards=options.ranks)
    given = {"num_repeats": options.repeats, "options": options}
    work = "benchmarks.plan_graph:bench_plan_graph"
    return run_on_ranks(meeting, arguments, work, NAMES, given, main=MAIN)


def _check(options: PlanGraphBench) -> None:
    if options.repeats < 1:
        raise InputError(f"--repeats {options.repeats}: must be at least 1")
    of_ways = ("stages", "dp", "shards", "split", "adjacency", "chunks", "halo")
    chosen = (*of_ways, "microbatches", "sampler")
    check_left_out(options, PlanGraphBench(), chosen, "is chosen")
    if options.ranks < 2:
        raise InputError(f"--ranks {options.ranks}: must be at least 2, so that there are ways")
    parse_cases(options.cases, options)


def bench_plan_graph(
    run: Run,
    rank: int,
    device: torch.device,
    folder: Path,
    num_repeats: int,
    options: PlanGraphBench,
) -> None:
    """Predict and measure every case, as one of the ranks; rank 0 writes the page.

    Args:
        run: any run in this world of ranks.
        rank: position in the world.
        device: device of this rank.
        folder: of the results.
        num_repeats: timed rounds of every case.
        options: those of the benchmark.
    """
    rows: list[Row] = []
    for case in parse_cases(options.cases, options):
        config = replace(options, **case.options, shards=1, out=None)
        of_case = on_one_rank(prepare(config, run.dtype), config)
        found = _measure(case, of_case, rank, device, num_repeats, run.layout.world_size)
        rows += found
        if rank == 0:
            (verdict,) = verdicts(found)
            print(f"{case.name}: {_sentence(verdict)}", flush=True)
    if rank == 0:
        write(folder, rows, f"{run.layout.world_size} ranks, {num_repeats} repeats", device)


def _measure(
    case: Case, run: Run, rank: int, device: torch.device, num_repeats: int, num_ranks: int
) -> list[Row]:
    measured = measure_ways(run, rank, device, num_ranks)
    choice: Choice | None = choose(measured, Cluster()) if rank == 0 else None
    steps = {}
    if choice is not None:
        for outcome in choice.outcomes:
            number = round(_CALL_SECONDS / outcome.step_seconds)
            least = 1 if outcome.way.steps_per_epoch == 1 else _PARTS
            steps[outcome.way.name] = max(least, min(_MOST_STEPS, number))
    steps = broadcast_value(steps, num_ranks)
    takers = [c for c in list_ways(run.config, num_ranks) if c.name in steps]
    real = {c.name: _Real(arrange(run, c, device), rank, device, steps[c.name]) for c in takers}
    contenders = {name: way.take for name, way in real.items()}
    timings = alternate(contenders, "one rank", num_repeats, device)
    sent = {name: _total(way.sent_bytes, device) for name, way in real.items()}
    for way in real.values():
        way.close()
    if choice is None:
        return []
    rows: list[Row] = []
    for outcome in choice.outcomes:
        way = outcome.way
        scale = way.steps_per_epoch / steps[way.name]
        seconds = [scale * value for value in timings.seconds[way.name]]
        calls = steps[way.name] * (NUM_WARMUP + num_repeats)
        rows.append(
            Row(
                case.name,
                way.name,
                way.options,
                way.is_same,
                outcome is choice.best,
                outcome.epoch_seconds,
                median(seconds),
                min(seconds),
                max(seconds),
                way.exchanged_bytes,
                sent[way.name] // calls,
            )
        )
    return rows


class _Real:
    """A rank's part in real steps of a way.

    Args:
        run: of the way.
        rank: position in the world; ranks that have no part do nothing.
        device: device of this rank.
        num_steps: steps of a call.
    """

    def __init__(self, run: Run, rank: int, device: torch.device, num_steps: int) -> None:
        self._num_steps, self._sent_before = num_steps, 0
        self._steps = Steps(run, rank, device) if rank < run.layout.world_size else None
        if self._steps is not None:
            self._steps.take()  # fetches what is kept from then on
            self._sent_before = self._steps.state.mesh.shards.sent.total()

    @property
    def sent_bytes(self) -> int:
        """What this rank has given to those that share its batch, in all calls."""
        if self._steps is None:
            return 0
        return self._steps.state.mesh.shards.sent.total() - self._sent_before

    def take(self) -> None:
        if self._steps is not None:
            for _ in range(self._num_steps):
                self._steps.take()

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()


def _total(value: int, device: torch.device) -> int:
    total = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Compare the choice of every case with the best way."""
    found: list[Verdict] = []
    for name in dict.fromkeys(row.case for row in rows):
        same = [row for row in rows if row.case == name and row.is_same]
        (chosen,) = [row for row in same if row.is_chosen]
        best = min(same, key=lambda row: row.measured)
        found.append(Verdict(name, chosen, best, chosen.measured / best.measured - 1))
    return found


def _sentence(verdict: Verdict) -> str:
    chosen, best = verdict.chosen, verdict.best
    if chosen is best:
        return f"takes {chosen.way}, the best: {chosen.measured:.3g} s an epoch"
    return (
        f"takes {chosen.way}, {chosen.measured:.3g} s an epoch; the best is {best.way}, "
        f"{best.measured:.3g} s, so that {verdict.loss:.1%} are lost"
    )


def write(folder: Path, rows: Sequence[Row], how: str, device: torch.device) -> None:
    """Print the tables; write README.md, rows.csv and the picture.

    Args:
        folder: of the results.
        rows: of all cases.
        how: with how many ranks and repeats they were measured.
        device: device of this rank.
    """
    judged = verdicts(rows)
    good = sum(verdict.loss <= WITHIN for verdict in judged)
    right = sum(verdict.chosen is verdict.best for verdict in judged)
    errors = [abs(row.predicted / row.measured - 1) for row in rows if row.is_same]
    text = (
        "For every case, `vigpipe plan --ranks` predicts the ways to use the ranks, and says which "
        "to take of those whose steps are one rank's; then each way takes real steps in turn. "
        f"{how}. Of {len(judged)} cases, the choice is the best way in {right}, and within "
        f"{WITHIN:.0%} of it in {good}; at most {max(v.loss for v in judged):.1%} are lost. "
        f"Predicted and measured epochs of these ways differ by {median(errors):.0%} (median), at "
        f"most by {max(errors):.0%}."
    )
    headers = ["case", "to take", "s an epoch", "best", "s an epoch", "lost"]
    lines = [
        (
            v.case,
            v.chosen.way,
            f"{v.chosen.measured:.3g}",
            v.best.way,
            f"{v.best.measured:.3g}",
            f"{v.loss:.1%}",
        )
        for v in judged
    ]
    more = ["case", "way", "steps of one rank", "predicted, s an epoch", "measured", "min – max"]
    more += ["MB exchanged a step, predicted", "measured"]
    every = [
        (
            row.case,
            row.way,
            "yes" if row.is_same else "no",
            f"{row.predicted:.3g}",
            f"{row.measured:.3g}",
            f"{row.least:.3g} – {row.most:.3g}",
            f"{row.predicted_bytes / 1e6:,.2f}",
            f"{row.sent_bytes / 1e6:,.2f}",
        )
        for row in rows
    ]
    print(f"\n{text}\n\n{tabulate(lines, headers, disable_numparse=True)}\n")
    pages = [
        tabulate(table, names, tablefmt="github", disable_numparse=True)
        for table, names in ((lines, headers), (every, more))
    ]
    (folder / "README.md").write_text(
        f"# Which way to use several ranks on a graph: chosen, and measured\n\n{text}\n\n"
        f"{pages[0]}\n\n![Predicted against measured epochs]({PICTURE})\n\n{pages[1]}\n\n"
        f"{origin(device)}- warm-up: {NUM_WARMUP} rounds; the ways of a case alternate; a step "
        "lasts as long as its slowest rank\n",
        encoding="utf-8",
    )
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    _draw(folder / PICTURE, rows)
    print(f"{folder}/README.md, rows.csv, {PICTURE}")


def _draw(path: Path, rows: Sequence[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for number, way in enumerate(dict.fromkeys(row.way for row in rows)):
        of_way = [row for row in rows if row.way == way]
        style: dict[str, Any] = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKERS[number % len(_MARKERS)],
        }
        measured, predicted = [r.measured for r in of_way], [r.predicted for r in of_way]
        panel.plot(measured, predicted, ls="none", ms=5, label=way, **style)
    for row in rows:
        if row.is_chosen:
            ring: dict[str, Any] = {
                "ms": 12,
                "mfc": "none",
                "mec": "0.5",
                "marker": "o",
                "ls": "none",
            }
            label = None if panel.get_legend_handles_labels()[1][-1] == "to take" else "to take"
            panel.plot([row.measured], [row.predicted], label=label, **ring)
    ends = [value for row in rows for value in (row.measured, row.predicted)]
    line = [0.7 * min(ends), 1.4 * max(ends)]
    panel.plot(line, line, color="0.7", lw=1, zorder=0)
    panel.set(xscale="log", yscale="log", xlim=line, ylim=line)
    panel.set(xlabel="measured, s an epoch", ylabel="predicted, s an epoch")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=120)
