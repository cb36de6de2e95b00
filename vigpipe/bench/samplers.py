"""What does each way to sample a graph learn, keep and cost? Real training runs, several seeds.

Every run is `vigpipe train` with the same options, but for the sampler, its parts or its sizes, the
epochs and the seed. What is compared is the test score at the epoch whose validation score is best,
as is usual for graphs.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from vigpipe.bench.options import SamplersBench
from vigpipe.bench.trained import (
    FILES,
    Table,
    all_of,
    best_evaluation,
    check_graph_model,
    check_seeds,
    train,
    write_page,
    write_shared,
)
from vigpipe.bench.ways import OF_WAYS, Way, parse_ways
from vigpipe.errors import InputError
from vigpipe.run.folder import METRICS, make_output_folder
from vigpipe.run.follow import parse_rows, step_rows


class Learned(NamedTuple):
    """What a run has learned.

    Attributes:
        way: its name.
        seed: of the run.
        accuracy: of the test nodes, at the epoch with the best accuracy of the validation nodes.
        macro_f1: of the test nodes, at the same epoch.
        epoch: number of that epoch.
        steps: number of steps of the run.
        kept_edges: share of the edges that end in a sub-graph's nodes which are in it.
        preparation_seconds: what it took one process to prepare the sampler: to make the parts, or
            to count what is drawn how often.
        read_seconds: what it takes every further process to read that from a file; None where
            nothing is kept in one, so that each prepares its own.
        epoch_seconds: median duration of the steps of an epoch, without the evaluation.
        peak_bytes: largest memory of the process.
    """

    way: str
    seed: int
    accuracy: float
    macro_f1: float
    epoch: int
    steps: int
    kept_edges: float
    preparation_seconds: float
    read_seconds: float | None
    epoch_seconds: float
    peak_bytes: int


def bench_samplers(options: SamplersBench) -> None:
    """Run every way with every seed, and write README.md and rows.csv.

    Raises:
        InputError: an option is out of range, or a run has failed.
    """
    check_seeds(options.seeds)
    check_graph_model(options.model)
    if options.seed:
        raise InputError(f"--seed {options.seed}: is what --seeds is for")
    ways = parse_ways("ways", options)
    folder = make_output_folder(options.out, FILES)
    write_shared(folder, options, ("seed", *OF_WAYS, "seeds", "ways"))
    runs = (partial(_run, folder, way, seed) for seed in range(options.seeds) for way in ways)
    _write(folder, options, all_of(runs))


def _run(folder: Path, way: Way, seed: int) -> Learned:
    out = folder / "runs" / f"{re.sub('[^a-z0-9]+', '-', way.name)}-{seed}"
    name = f"{way.name} with seed {seed}"
    found = read_run(out, train(folder, out, {**way.options, "seed": seed}, name), way.name, seed)
    print(
        f"{way.name}, seed {seed}: accuracy {found.accuracy:.2%} of the test nodes after epoch "
        f"{found.epoch}, which has the best validation accuracy",
        flush=True,
    )
    return found


def read_run(folder: Path, summary: Mapping[str, Any], way: str, seed: int) -> Learned:
    """Read what a finished run has learned.

    Args:
        folder: of the run.
        summary: content of its summary.json.
        way: its name.
        seed: of the run.

    Raises:
        InputError: its graph has no validation nodes.
    """
    rows = parse_rows((folder / METRICS).read_bytes())
    best = best_evaluation(rows, "accuracy", folder)
    of_epoch: dict[int, float] = {}
    for row in step_rows(rows):
        seconds = row["step_seconds"] + row["data_seconds"]
        of_epoch[row["epoch"]] = of_epoch.get(row["epoch"], 0.0) + seconds
    of_graph: Mapping[str, Any] = summary["graph"]
    prepared: Mapping[str, Any] = of_graph.get("partition") or of_graph.get("counted") or {}
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


def _write(folder: Path, options: SamplersBench, learned: Sequence[Learned]) -> None:
    """Print the table; write README.md and rows.csv."""
    by_way: dict[str, list[Learned]] = {}
    for found in learned:
        by_way.setdefault(found.way, []).append(found)
    headers = ["", "edges kept", "steps", "test accuracy", "min – max", "macro-F1"]
    headers += ["s to prepare", "ms to read", "s an epoch", "peak memory"]
    question = (
        f"{options.model} on {options.data}: the test accuracy at the epoch with the best "
        f"validation accuracy. Seeds: {options.seeds}; ± is the standard deviation over them. "
        "Edges kept are those, of all that end in the nodes of a sub-graph, which are in it; where "
        "layers have edges of their own, of all that end in nodes which a layer makes features of. "
        "Times are medians. One process prepares: it cuts the graph, or counts what is drawn how "
        "often; others read that from a file, or prepare for themselves where there is none. "
        "Seconds of an epoch are without its evaluation."
    )
    table = Table("", headers, [_row(way, found) for way, found in by_way.items()])
    write_page(folder, "What each way to sample a graph learns", question, [table], learned)


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
