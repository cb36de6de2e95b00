"""What do ranks learn whose halos are late, or sampled? Real training runs, several seeds.

Every run is `vigpipe train --split halo` with the same options, but for --halo and the seed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from benchmarks.options import HalosBench
from benchmarks.trained import (
    Question,
    Table,
    TrainedRun,
    best_evaluation,
    check_graph_model,
    check_left_out,
    check_seeds,
)
from vigpipe.config.halo import parse_halo
from vigpipe.errors import InputError
from vigpipe.run.folder import METRICS
from vigpipe.run.follow import parse_rows, step_rows

_PICTURE = "losses.png"
# Okabe and Ito's colours.
_COLOURS = ("black", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


class Learned(NamedTuple):
    """What a run has learned."""

    halo: str  # its --halo
    seed: int
    # Of the test nodes, at the epoch with the best accuracy of the validation nodes.
    accuracy: float
    epoch: int  # number of that epoch
    loss: float  # of training, mean of the last tenth of the steps
    # Rows of halos and their gradients that all ranks have sent, evaluations included.
    halo_bytes: int
    step_seconds: float  # median duration of a step


class Curve(NamedTuple):
    """The course of a run: losses of its steps, and accuracies of the validation nodes."""

    halo: str
    losses: Sequence[float]
    accuracies: Sequence[float]


def _plan(options: HalosBench) -> list[TrainedRun]:
    check_seeds(options.seeds)
    check_graph_model(options.model)
    check_left_out(options, HalosBench(), ("seed", "split", "halo"))
    if options.shards < 2:
        raise InputError(f"--shards {options.shards}: ranks with parts need 2 or more")
    halos = [halo.strip() for halo in options.halos.split(",")]
    for halo in halos:
        parse_halo(halo)
    return [_run(halo, seed) for seed in range(options.seeds) for halo in halos]


def _run(halo: str, seed: int) -> TrainedRun:
    folder = f"{re.sub('[^a-z0-9]+', '-', halo)}-{seed}"
    options = {"split": "halo", "halo": halo, "seed": seed}
    return TrainedRun(f"{halo} with seed {seed}", folder, options, (halo, seed))


def _read(options: HalosBench, run: TrainedRun, out: Path, summary: Mapping[str, Any]) -> Learned:
    rows = parse_rows((out / METRICS).read_bytes())
    best, steps = best_evaluation(rows, "accuracy", out), step_rows(rows)
    (halo, seed), losses = run.case, [row["loss"] for row in steps]
    return Learned(
        halo,
        seed,
        best["accuracy"],
        best["epoch"],
        fmean(losses[-max(1, len(losses) // 10) :]),
        summary["shards"]["sent_bytes"].get("halos", 0),
        median(row["step_seconds"] for row in steps),
    )


def _page(options: HalosBench, learned: Sequence[Learned], folder: Path) -> tuple[str, list[Table]]:
    _draw(folder / _PICTURE, [_curve(folder, run) for run in learned])
    headers = ["--halo", "test accuracy", "min – max", "training loss", "MB of halos", "ms a step"]
    by_halo: dict[str, list[Learned]] = {}
    for found in learned:
        by_halo.setdefault(found.halo, []).append(found)
    cells = [_cells(halo, found) for halo, found in by_halo.items()]
    words = (
        f"{options.model} on {options.data}, {options.shards} ranks with a part of METIS each: the "
        "test accuracy at the epoch with the best validation accuracy, and the training loss of "
        f"the last tenth of the steps. Seeds: {options.seeds}; ± is the standard deviation over "
        "them. MB of halos are all rows and gradients that crossed a boundary in a run, with the "
        "exact ones of its evaluations. Times are medians. The picture has the mean over the seeds "
        f"of every step and evaluation.\n\n![Losses and accuracies]({_PICTURE})"
    )
    return words, [Table("", headers, cells)]


def _curve(folder: Path, learned: Learned) -> Curve:
    run = folder / "runs" / _run(learned.halo, learned.seed).folder
    rows = parse_rows((run / METRICS).read_bytes())
    accuracies = [row["validation"]["accuracy"] for row in rows if "accuracy" in row]
    return Curve(learned.halo, [row["loss"] for row in step_rows(rows)], accuracies)


def _cells(halo: str, found: Sequence[Learned]) -> tuple[str, ...]:
    accuracies, losses = [f.accuracy for f in found], [f.loss for f in found]
    of_accuracy = f" ± {100 * stdev(accuracies):.2f}" if len(found) > 1 else ""
    return (
        halo,
        f"{100 * fmean(accuracies):.2f}{of_accuracy} %",
        f"{min(accuracies):.2%} – {max(accuracies):.2%}",
        f"{fmean(losses):.4f}",
        f"{fmean(f.halo_bytes for f in found) / 1e6:,.1f}",
        f"{1e3 * median(f.step_seconds for f in found):,.0f}",
    )


def _draw(path: Path, curves: Sequence[Curve]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for number, halo in enumerate(dict.fromkeys(curve.halo for curve in curves)):
        of_halo = [curve for curve in curves if curve.halo == halo]
        style = {"color": _COLOURS[number % len(_COLOURS)], "label": halo, "lw": 1.2}
        for panel, name in zip(panels, ("losses", "accuracies"), strict=True):
            means = [fmean(at) for at in zip(*(getattr(c, name) for c in of_halo), strict=True)]
            panel.plot(range(1, len(means) + 1), means, **style)
    panels[0].set(xlabel="step", title="training loss")
    panels[1].set(xlabel="evaluation", title="accuracy of the validation nodes")
    for panel in panels:
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


QUESTION = Question(
    title="What ranks learn whose halos are late, or sampled",
    not_shared=("seed", "split", "halo", "halos", "seeds"),
    plan=_plan,
    read=_read,
    told=lambda found: (
        f"accuracy {found.accuracy:.2%} of the test nodes after epoch {found.epoch}, training loss "
        f"{found.loss:.4f}"
    ),
    page=_page,
    files=(_PICTURE,),
)
