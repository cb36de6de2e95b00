"""What do ranks that share a graph, or images, send and hold? Counted in one process.

Every rank of every layout takes its part in a step, alone: what others would give it are zeros, but
as many. So counts need no ranks, and a graph can be looked at before a cluster is asked for.
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.options import SplitBench
from benchmarks.trained import check_left_out, parse_numbers
from vigpipe.config.choices import Split
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError
from vigpipe.graphs.job import GraphJob
from vigpipe.graphs.split.halo import HaloEdges
from vigpipe.job.feed import Needs
from vigpipe.launch.device import weight_dtype
from vigpipe.model.vig import VisionGnn
from vigpipe.ops.sparse_rows import SparseRows
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.profiling.live_bytes import LiveBytes
from vigpipe.profiling.rehearse import CountedShards
from vigpipe.run.facts import Run, prepare
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import origin

FILES = ("README.md", "rows.csv", "traffic.png")
_NUM_LAYERS = 3
_WAYS: tuple[Split, ...] = ("mixed", "halo")
_COLOURS = {"mixed": "#0072b2", "halo": "#d55e00"}  # Okabe and Ito's


class Row(NamedTuple):
    """What the ranks of a layout send and hold in a step."""

    split: str  # how they share the graph
    shards: int  # m
    sent_bytes: int  # what all of them send one another in a step, without gradients of weights
    peak_bytes: int  # of features, activations and what is exchanged, on the rank that has most
    rows: float  # nodes of the rank that has most, to the mean
    # Rows that a rank sums over: its own and its halo, to the mean of its own; of the rank with
    # most. With mixed, columns of the rank that has most, to the mean. With images, both are those
    # of the first block.
    sources: float


def bench_split(options: SplitBench) -> None:
    """Count for every number of ranks, and write README.md, rows.csv and traffic.png.

    Raises:
        InputError: an option is out of range, or what is trained on cannot be shared so.
    """
    check_left_out(options, SplitBench(), ("shards", "split", "dp", "stages"), "is chosen")
    numbers = parse_numbers("numbers", options.numbers)
    torch.set_num_threads(options.threads or 1)
    is_graph = MODEL_DEFAULTS[options.model].job == "graph"
    num_layers = _NUM_LAYERS if is_graph and options.layers is None else options.layers
    config = replace(options, out=None, layers=num_layers)
    run = prepare(config, weight_dtype(config.dtype))
    if is_graph and run.config.sampler != "full":
        raise InputError(f"--sampler {run.config.sampler}: the whole graph is shared; leave it out")
    for number in numbers:
        of_ranks = run.job.with_options(replace(run.config, shards=number))
        of_ranks.check(Layout(num_shards=number), run.wide_model, run.plan)
    folder = make_output_folder(options.out, FILES)
    rows = [_count(run, "mixed", 1)]
    for number in numbers:
        for split in _WAYS if is_graph else _WAYS[:1]:
            rows.append(_count(run, split, number))
            row = rows[-1]
            print(f"{split}, m = {number}: {row.sent_bytes / 1e6:,.1f} MB a step", flush=True)
    _write(folder, run, rows)


class Counted(NamedTuple):
    """What one rank sends and holds in a step; see `Row`."""

    sent_bytes: int
    peak_bytes: int
    rows: int
    sources: int


def _count(run: Run, split: Split, number: int) -> Row:
    """Count what each of m ranks sends and holds."""
    ranks = [_count_rank(run, split, number, rank) for rank in range(number)]
    mean = sum(rank.rows if split == "halo" else rank.sources for rank in ranks) / number
    return Row(
        split,
        number,
        sum(rank.sent_bytes for rank in ranks),
        max(rank.peak_bytes for rank in ranks),
        number * max(rank.rows for rank in ranks) / sum(rank.rows for rank in ranks),
        max(rank.sources for rank in ranks) / mean,
    )


def _count_rank(run: Run, split: Split, number: int, rank: int) -> Counted:
    """Let a rank take its part in two steps, and count the second."""
    job = run.job.with_options(replace(run.config, shards=number, split=split))
    layout, shards = Layout(num_shards=number), CountedShards(number, rank)
    needs = Needs(
        layout, 0, torch.device("cpu"), run.dtype, has_first=True, has_last=True, shards=shards
    )
    feed = job.feed(needs)
    model, loss = run.build().train(), job.loss(None)
    if number > 1:
        job.share_models([model], shards)

    def step(item: int) -> ReplicaBatch:
        batch = feed.batch(item)
        with live:
            live.add(_features_of(batch))
            draws = model.draw(batch.keys, run.dtype)
            logits = model(batch.inputs, draws, *_structure(batch))
            loss.begin(batch.num_samples)
            assert batch.labels is not None
            loss(logits, batch.labels).backward()
        model.zero_grad()
        return batch

    live = LiveBytes()
    step(0)
    before, live = shards.sent.total(), LiveBytes()
    batch = step(1)
    feed.close()
    rows, sources = batch.sizes[0], shards.count(run.config.width or 1)
    if isinstance(model, VisionGnn):
        spec = model.specs[0]
        rows, sources = shards.count(spec.grid[0]), shards.count(spec.channels)
    elif isinstance(edges := _structure(batch)[0], HaloEdges):
        sources = edges.halo.length(rank)
    return Counted(shards.sent.total() - before, live.peak, rows, sources)


def _features_of(batch: ReplicaBatch) -> list[Tensor]:
    """Return the features that a rank has: dense ones, or those that are not 0."""
    rest = _structure(batch)[1:]
    sparse = [t for f in rest if isinstance(f, SparseRows) for t in (f.values, f.places.indices)]
    return [*sparse, *([] if batch.inputs is None else [batch.inputs])]


def _structure(batch: ReplicaBatch) -> tuple[Any, ...]:
    """Return what the model takes besides rows and keys; images are nothing but rows."""
    return batch.structures[0] if batch.structures else ()


def _write(folder: Path, run: Run, rows: Sequence[Row]) -> None:
    base, job = rows[0], run.job
    config = run.config
    first = {row.split: row for row in reversed(rows[1:])}
    table = [
        (
            row.split if row.shards > 1 else "one rank",
            row.shards,
            f"{row.sent_bytes / 1e6:,.1f}",
            f"{row.sent_bytes / first[row.split].sent_bytes:.2f}" if row.shards > 1 else "",
            f"{row.peak_bytes / 1e6:,.1f}",
            f"{row.peak_bytes / base.peak_bytes:.3f}",
            f"{row.rows:.3f}",
            f"{row.sources:.3f}",
        )
        for row in rows
    ]
    headers = ["", "m", "MB sent a step", "to the first", "MB held", "of one rank's", "nodes"]
    headers += ["columns, or rows that are summed over"]
    if isinstance(job, GraphJob):
        what = f"{config.layers} layers, width {config.width:,}, on {job.name}"
        what += f" ({'; '.join(job.notes)})"
    else:
        assert isinstance(run.wide_model, VisionGnn)  # `ImageJob.check` has refused others
        height, width = run.wide_model.img_size
        what = f"{height:,} × {width:,} pixels of {job.name}, batch {run.batch_size:,}"
    text = (
        f"{config.model}, {what}, {config.dtype}. A step of m ranks, counted in one process: "
        "what all of them send one another, without the gradients of the weights; and the most "
        "bytes of features, activations, their gradients and what is exchanged that exist at a "
        "time on the rank that holds most. Edges, weights and the optimizer are not counted. The "
        "last columns compare the rank that has most with the mean: its nodes; with mixed its "
        "columns of a layer, with halo the rows that it sums over, its own and those of its halo, "
        "to the mean of the own."
    )
    print(f"\n{text}\n\n{tabulate(table, headers, disable_numparse=True)}\n")
    page = tabulate(table, headers, tablefmt="github", disable_numparse=True)
    picture = "![Bytes a step by the number of ranks](traffic.png)"
    (folder / "README.md").write_text(
        f"# What ranks that share a batch send and hold\n\n{text}\n\n{page}\n\n{picture}\n\n"
        f"{origin(torch.device('cpu'))}",
        encoding="utf-8",
    )
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    _draw(folder / "traffic.png", rows)
    print(f"{folder}/README.md, rows.csv, traffic.png")


def _draw(path: Path, rows: Sequence[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    labels = ("MB sent a step, by all ranks", "MB held, by the rank that holds most")
    for panel, name, label in zip(panels, ("sent_bytes", "peak_bytes"), labels, strict=True):
        for split in _WAYS:
            of_split = [row for row in rows if row.split == split and row.shards > 1]
            if not of_split:
                continue
            numbers = [row.shards for row in of_split]
            values = [getattr(row, name) / 1e6 for row in of_split]
            panel.plot(numbers, values, "o-", ms=4, color=_COLOURS[split], label=split)
        panel.set(xlabel="ranks", title=label)
        panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
