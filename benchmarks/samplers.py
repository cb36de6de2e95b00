"""What does each way to sample a graph learn, keep and cost? Real training runs, several seeds.

Every run is `vigpipe train` with the same options, but for the sampler, its parts or its sizes, the
epochs and the seed. What is compared is the test score at the epoch whose validation score is best,
as is usual for graphs.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from benchmarks.options import SamplersBench
from benchmarks.trained import (
    Question,
    Table,
    TrainedRun,
    best_evaluation,
    check_graph_model,
    check_seeds,
)
from benchmarks.ways import OF_WAYS, parse_ways
from vigpipe.errors import InputError
from vigpipe.run.folder import METRICS
from vigpipe.run.follow import parse_rows, step_rows


class Learned(NamedTuple):
    """What a run has learned."""

    way: str  # its name
    seed: int
    # Of the test nodes, at the epoch with the best accuracy of the validation nodes.
    accuracy: float
    macro_f1: float  # of the test nodes, at the same epoch
    epoch: int  # number of that epoch
    steps: int
    kept_edges: float  # share of the edges that end in a sub-graph's nodes which are in it
    # What it took one process to prepare the sampler: to make the parts, or to count what is drawn
    # how often.
    preparation_seconds: float
    # What it takes every further process to read that from a file; None where nothing is kept in
    # one, so that each prepares its own.
    read_seconds: float | None
    epoch_seconds: float  # median duration of the steps of an epoch, without the evaluation
    peak_bytes: int  # largest memory of the process


def _plan(options: SamplersBench) -> list[TrainedRun]:
    check_seeds(options.seeds)
    check_graph_model(options.model)
    if options.seed:
        raise InputError(f"--seed {options.seed}: is what --seeds is for")
    ways = parse_ways("ways", options)
    return [
        TrainedRun(
            f"{way.name} with seed {seed}",
            f"{re.sub('[^a-z0-9]+', '-', way.name)}-{seed}",
            {**way.options, "seed": seed},
            (way.name, seed),
        )
        for seed in range(options.seeds)
        for way in ways
    ]


def read(options: SamplersBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]) -> Learned:
    """Read what a finished run has learned; see `Question`.

    Raises:
        InputError: its graph has no validation nodes.
    """
    rows = parse_rows((out / METRICS).read_bytes())
    best = best_evaluation(rows, "accuracy", out)
    of_epoch: dict[int, float] = {}
    for row in step_rows(rows):
        seconds = row["step_seconds"] + row["data_seconds"]
        of_epoch[row["epoch"]] = of_epoch.get(row["epoch"], 0.0) + seconds
    of_graph: Mapping[str, Any] = summary["graph"]
    prepared: Mapping[str, Any] = of_graph.get("partition") or of_graph.get("counted") or {}
    way, seed = run.case
    return Learned(
        way,
        seed,
        best["accuracy"],
        best["macro_f1"],
        best["epoch"],
        summary["steps"],
        of_graph["kept_edge_fraction"],
        prepared.get("seconds", of_graph["sampler_seconds"]),
        prepared.get("read_seconds"),
        median(of_epoch.values()),
        summary["peak_bytes"],
    )


def _page(
    options: SamplersBench, learned: Sequence[Learned], folder: Path
) -> tuple[str, list[Table]]:
    by_way: dict[str, list[Learned]] = {}
    for found in learned:
        by_way.setdefault(found.way, []).append(found)
    headers = ["", "edges kept", "steps", "test accuracy", "min – max", "macro-F1"]
    headers += ["s to prepare", "ms to read", "s an epoch", "peak memory"]
    words = (
        f"{options.model} on {options.data}: the test accuracy at the epoch with the best "
        f"validation accuracy. Seeds: {options.seeds}; ± is the standard deviation over them. "
        "Edges kept are those, of all that end in the nodes of a sub-graph, which are in it; where "
        "layers have edges of their own, of all that end in nodes which a layer makes features of. "
        "Times are medians. One process prepares: it cuts the graph, or counts what is drawn how "
        "often; others read that from a file, or prepare for themselves where there is none. "
        "Seconds of an epoch are without its evaluation."
    )
    return words, [Table("", headers, [_row(way, found) for way, found in by_way.items()])]


def _row(way: str, found: Sequence[Learned]) -> tuple[str, ...]:
    accuracies = [f.accuracy for f in found]
    read = [f.read_seconds for f in found if f.read_seconds is not None]
    spread = f" ± {100 * stdev(accuracies):.2f}" if len(found) > 1 else ""
    return (
        way,
        f"{fmean(f.kept_edges for f in found):.1%}",
        f"{found[0].steps}",
        f"{100 * fmean(accuracies):.2f}{spread} %",
        f"{min(accuracies):.2%} – {max(accuracies):.2%}",
        f"{fmean(f.macro_f1 for f in found):.3f}",
        f"{median(f.preparation_seconds for f in found):.2f}",
        f"{1000 * median(read):.1f}" if read else "",
        f"{median(f.epoch_seconds for f in found):.2f}",
        f"{median(f.peak_bytes for f in found) / 2**20:,.0f} MiB",
    )


QUESTION = Question(
    title="What each way to sample a graph learns",
    not_shared=("seed", *OF_WAYS, "seeds", "ways"),
    plan=_plan,
    read=read,
    told=lambda found: (
        f"accuracy {found.accuracy:.2%} of the test nodes after epoch {found.epoch}, which has the "
        "best validation accuracy"
    ),
    page=_page,
)
