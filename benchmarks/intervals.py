"""What do replicas learn from the parts of a graph that average seldom, all at once or in pairs?

The experiment of Y. Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (Concordia 2021):
a graph in 40 parts, 30 epochs of them, two layers of GraphSAGE of width 128. AllReduce-GCN averages
the gradients of all replicas after every TAU steps (algorithm 3), each replica has its own share of
the parts; GossipGCN those of two (algorithm 6), and a pool deals the parts out. Averaged gradients
leave the replicas different, and the best of them on the validation nodes is kept. The published
numbers stand beside.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.options import IntervalsBench
from benchmarks.trained import (
    Question,
    Table,
    TrainedRun,
    check_graph_model,
    check_left_out,
    check_seeds,
    parse_numbers,
    training_seconds,
)
from vigpipe.config.choices import PARTITIONS
from vigpipe.errors import InputError
from vigpipe.replication.metrics import balance
from vigpipe.run.folder import METRICS
from vigpipe.run.follow import parse_rows, step_rows

WAYS = {
    "all-reduce": {"strategy": "periodic", "items": "fixed"},
    "gossip": {"strategy": "gossip", "items": "pool"},
}
_OF_RUNS = ("seed", "sampler", "partition", "dp", "strategy", "items", "average_every", "final")
_LISTS = ("partitions", "replicas", "intervals")
# F1 and seconds of 30 epochs with TAU = 1, 20, 100, on V100s; random parts, 40 of Reddit and 640 of
# Amazon. One GPU: F1 0.9655 and 0.7828.
PUBLISHED = {
    ("Reddit", 4, "all-reduce"): ("16.01 / 14.08 / 13.66", ".9637 / .9501 / .9508"),
    ("Reddit", 4, "gossip"): ("12.46 / 11.74 / 10.62", ".9573 / .9599 / .9613"),
    ("Reddit", 8, "all-reduce"): ("10.21 / 10.11 / 10.07", ".9609 / .9449 / .9435"),
    ("Reddit", 8, "gossip"): ("9.62 / 7.44 / 5.68", ".9502 / .9566 / .9538"),
    ("Amazon", 4, "all-reduce"): ("103.65 / 87.13 / 79.31", ".7745 / .7473 / .7472"),
    ("Amazon", 4, "gossip"): ("73.80 / 56.81 / 51.97", ".7537 / .7545 / .7518"),
    ("Amazon", 8, "all-reduce"): ("64.18 / 59.13 / 53.20", ".7721 / .7189 / .7187"),
    ("Amazon", 8, "gossip"): ("61.65 / 41.39 / 29.42", ".7222 / .7393 / .7401"),
}


class Case(NamedTuple):
    """What differs from run to run."""

    partition: str  # how the graph is cut
    way: str  # one of WAYS; alone for a single process
    replicas: int  # D
    every: int  # TAU; 0 for a single process
    seed: int


class Outcome(NamedTuple):
    """What a run came to."""

    partition: str  # as for a Case, and so are way, replicas, every and seed
    kept_edges: float  # share of the graph's edges inside parts
    way: str
    replicas: int
    every: int
    seed: int
    f1: float  # micro-F1 of the test nodes, with the weights that are kept
    seconds: float  # that the slowest replica has worked, waited and averaged
    items: str  # parts that each replica has taken, with spaces between them
    evenness: float  # of their seconds of work, mean over largest


def _plan(options: IntervalsBench) -> list[TrainedRun]:
    check_seeds(options.seeds)
    check_graph_model(options.model)
    check_left_out(options, IntervalsBench(), _OF_RUNS)
    partitions = [word.strip() for word in options.partitions.split(",")]
    for word in partitions:
        if word not in PARTITIONS:
            raise InputError(
                f"--partitions {options.partitions}: {word!r} is not {', '.join(PARTITIONS)}"
            )
    replicas, intervals = (parse_numbers(name, getattr(options, name)) for name in _LISTS[1:])
    several = [(way, d, every) for d in replicas for way in WAYS for every in intervals]
    return [
        _run(options, Case(partition, *layout, seed))
        for partition in partitions
        for seed in range(options.seeds)
        for layout in [("alone", 1, 0), *several]
    ]


def _run(options: IntervalsBench, case: Case) -> TrainedRun:
    partition, way, replicas, every, seed = case
    # Scored once: an evaluation would be part of the time of the replica that does it.
    chosen: dict[str, object] = {"sampler": "parts", "evaluate_every": options.epochs or 1}
    chosen |= {"partition": partition, "seed": seed}
    if way in WAYS:
        chosen |= {**WAYS[way], "dp": replicas, "average_every": every, "average": options.average}
        if options.average == "gradients":
            chosen["final"] = "best"
    layout = f"{way} with {replicas} replicas, --average-every {every}"
    name = f"{layout if way in WAYS else 'one process'} and seed {seed}"
    folder = f"{partition}-{way}-{replicas}-{every}-{seed}"
    return TrainedRun(f"{partition} parts, {name}", folder, chosen, case)


def _read(
    options: IntervalsBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]
) -> Outcome:
    rows, case = parse_rows((out / METRICS).read_bytes()), run.case
    if case.way in WAYS:
        items = [replica["items"] for replica in summary["replicas"]["each"]]
        evenness = summary["replicas"]["busy"]["efficiency"]
    else:
        items, evenness = [len(step_rows(rows))], 1.0
    return Outcome(
        **case._asdict(),
        kept_edges=summary["graph"]["partition"]["kept_edge_fraction"],
        f1=summary["test"]["micro_f1"],
        seconds=training_seconds(summary, rows),
        items=" ".join(f"{count:.0f}" for count in items),
        evenness=evenness,
    )


def _page(
    options: IntervalsBench, found: Sequence[Outcome], folder: Path
) -> tuple[str, list[Table]]:
    taus = " / ".join(map(str, parse_numbers("intervals", options.intervals)))
    tables: list[Table] = []
    for partition in dict.fromkeys(run.partition for run in found):
        own = [run for run in found if run.partition == partition]
        kept = fmean(run.kept_edges for run in own)
        title = f"{partition} parts, {kept:.1%} of the edges kept; TAU = {taus}"
        headers = ["replicas", "", "seconds", "F1", "times as fast as one process"]
        tables.append(Table(title, [*headers, "all-reduce / gossip"], _rows(own)))
    rows = [
        (str(run.replicas), run.way, str(run.every), run.partition, run.items, *_spread(run))
        for run in found
        if run.way in WAYS and run.seed == 0
    ]
    headers = ["replicas", "", "TAU", "parts", "items of each", "CV", "most / fewest"]
    tables.append(Table("Items of seed 0", [*headers, "work, mean / most"], rows))
    published = [(data, str(d), way, *values) for (data, d, way), values in PUBLISHED.items()]
    title = "Published: V100 GPUs that were shared with other jobs; TAU = 1 / 20 / 100"
    tables.append(Table(title, ["data", "GPUs", "", "seconds", "F1"], published))
    kept = "the mean of the replicas"
    if options.average == "gradients":
        kept = "the best replica on the validation nodes"
    words = (
        f"{options.model} on {options.data}, {options.epochs} epochs; {options.average} are "
        "averaged every TAU steps, of all replicas or of two. F1 is the micro-F1 of the test nodes "
        f"with the weights after the last step, of {kept}. Seconds are those that the slowest "
        "replica has worked, waited and averaged, without evaluations and without the time to cut "
        f"the graph. Means over the seeds; there are {options.seeds}."
    )
    return words, tables


def _rows(found: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Make the rows of one way to cut the graph: those of a thesis' tables."""
    by_case: dict[tuple[int, str], dict[int, list[Outcome]]] = {}
    for run in found:
        by_case.setdefault((run.replicas, run.way), {}).setdefault(run.every, []).append(run)
    seconds = {
        case: [fmean(run.seconds for run in runs) for runs in by_every.values()]
        for case, by_every in by_case.items()
    }
    (alone,) = seconds[1, "alone"]
    rows: list[tuple[str, ...]] = []
    for (replicas, way), by_every in by_case.items():
        own = seconds[replicas, way]
        f1 = (f"{fmean(run.f1 for run in runs):.4f}" for runs in by_every.values())
        faster = " / ".join(f"{alone / s:.2f}" for s in own)
        ratios = ""
        if way == "gossip":
            both = zip(seconds[replicas, "all-reduce"], own, strict=True)
            ratios = " / ".join(f"{a / b:.2f}" for a, b in both)
        times = " / ".join(f"{s:.1f}" for s in own)
        rows.append((str(replicas), way, times, " / ".join(f1), faster, ratios))
    return rows


def _spread(run: Outcome) -> tuple[str, str, str]:
    items = [int(word) for word in run.items.split()]
    ratio = f"{max(items) / min(items):.1f}" if min(items) else "–"
    return f"{balance(items)['cv']:.2f}", ratio, f"{run.evenness:.2f}"


QUESTION = Question(
    title="Averages now and then on the parts of a graph",
    not_shared=(*_OF_RUNS, *_LISTS, "seeds", "average", "evaluate_every"),
    plan=_plan,
    read=_read,
    told=lambda found: f"F1 {found.f1:.4f} in {found.seconds:.1f} s; items {found.items}",
    page=_page,
)
