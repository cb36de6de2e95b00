"""How good is a trained model? Show its learning curve, beside classifiers on raw pixels."""

import csv
import json
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from tabulate import tabulate

from benchmarks.options import AccuracyBench
from benchmarks.trained import steps_by_replica
from vigpipe.config.options import parse_image_size
from vigpipe.data import Source, open_source
from vigpipe.errors import InputError
from vigpipe.run.folder import make_output_folder
from vigpipe.run.follow import step_rows
from vigpipe.run.provenance import format_versions, this_command

FILES = ("README.md", "rows.csv", "config.toml", "curve.png")
NUM_NEIGHBOURS = 10
INVERSE_REGULARISATION = 1e-3  # C of the linear classifier, on standardised pixels
MOST_ITERATIONS = 300  # of L-BFGS
_VALIDATION = "trained weights on the validation images"


def bench_accuracy(config: AccuracyBench) -> None:
    """Write README.md and curve.png about a finished run of `vigpipe train`.

    Raises:
        InputError: the folder holds no finished run, or its data do not exist any more.
    """
    rows, summary, options = _read_run(config.run)
    source = open_source(
        options["data"],
        data_dir=Path(options["data_dir"]),
        image_size=parse_image_size(options.get("image_size")),
        crop_pct=options.get("crop_pct", 1.0),
        seed=options.get("seed", 0),
        validation=options.get("validation", 0.0),
        skip_bad_images=options.get("skip_bad_images", False),
    )
    folder = make_output_folder(config.out, FILES)
    scores = [
        *[(name, row["top1"], row["top5"]) for name, row in _final_scores(rows)],
        *[(name, top1, None) for name, top1 in pixel_baselines(source).items()],
    ]
    _draw(folder / "curve.png", rows, scores)
    table = tabulate(
        [
            (name, f"{top1:.1%}", "" if top5 is None else f"{top5:.1%}")
            for name, top1, top5 in scores
        ],
        headers=["", "top-1", "top-5"],
        tablefmt="github",
        disable_numparse=True,
    )
    (folder / "README.md").write_text(
        f"# {summary['model']} on {summary['data']}\n\n{table}\n\n![curve](curve.png)\n\n"
        f"{summary['test']['images']} test images, {len(source.train)} training images, "
        f"{summary['steps']} steps in {summary['wall_seconds'] / 60:.1f} minutes, evaluations "
        f"included.\n\n- run: `python -m vigpipe.train --config config.toml`\n- this page: `"
        f"{this_command()}`\n- commit: {summary['commit']}\n- hardware: "
        f"{summary['hardware']}; {summary['threads_per_rank']} thread(s) a rank, "
        f"{summary['layout']['ranks']} rank(s)\n"
        f"- versions: {format_versions(summary['versions'])}\n"
        f"- the baselines see the same images, not augmented: {NUM_NEIGHBOURS} nearest neighbours, "
        f"and logistic regression on standardised pixels (C = {INVERSE_REGULARISATION}, at most "
        f"{MOST_ITERATIONS} iterations), both scikit-learn's\n",
        encoding="utf-8",
    )
    (folder / "config.toml").write_text(
        tomli_w.dumps({k: v for k, v in options.items() if k != "out"}), encoding="utf-8"
    )
    _write_epochs(folder / "rows.csv", rows)
    print(f"{table}\n\n{folder}/README.md, curve.png")


def pixel_baselines(source: Source) -> dict[str, float]:
    """Compute the top-1 scores of classifiers on raw pixels, by the name of the classifier."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = (
        split.read(range(len(split))).flatten(1).numpy() for split in (source.train, source.test)
    )
    models: dict[str, Any] = {
        "kNN on pixels": KNeighborsClassifier(NUM_NEIGHBOURS),
        "linear classifier on pixels": make_pipeline(
            StandardScaler(), LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MOST_ITERATIONS)
        ),
    }
    labels, test_labels = source.train.labels, source.test.labels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the page tells the iterations
        return {
            name: float(np.mean(model.fit(train, labels).predict(test) == test_labels))
            for name, model in models.items()
        }


def _read_run(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "event" not in row]
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        options = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--run {run}: holds no finished run of vigpipe train ({error}); name the folder that "
            "the run wrote"
        ) from error
    if any("nodes" in row for row in rows):
        raise InputError(
            f"--run {run}: is of a run on a graph, and this command compares with classifiers of "
            "pixels; name a run on images, or see vigpipe report"
        )
    missing = [name for name in ("data", "data_dir") if name not in options]
    if missing or not any("top1" in row for row in rows):
        raise InputError(f"--run {run}: has no evaluation to show; run vigpipe train to its end")
    return rows, summary, options


def _final_scores(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    last = [row for row in rows if "top1" in row][-1]
    named = [("trained weights", last)]
    if "ema" in last:
        named.append(("their moving average", last["ema"]))
    if "validation" in last:
        named.append((_VALIDATION, last["validation"]))
    return named


def _write_epochs(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one row per epoch: mean training loss, and the scores of the test images."""
    losses: dict[int, list[float]] = {}
    for row in step_rows(rows):
        losses.setdefault(row["epoch"], []).append(row["loss"])
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["epoch", "training_loss", "test_loss", "top1", "top5", "ema_top1"])
        for row in rows:
            if "top1" in row:
                mean = float(np.mean(losses[row["epoch"]]))
                average = row.get("ema", {}).get("top1", "")
                scores = (row["loss"], row["top1"], row["top5"], average)
                table.writerow([row["epoch"], mean, *scores])


def curves_of(rows: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Return steps and losses of each replica that takes steps of its own; else of the run.

    Args:
        rows: of metrics.jsonl.
    """
    replicas = steps_by_replica(rows).values()
    return [([r["step"] for r in own], [r["loss"] for r in own]) for own in replicas]


def _draw(path: Path, rows: list[dict[str, Any]], scores: list[tuple[str, float, Any]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tests = [row for row in rows if "top1" in row]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, accuracies = figure.subplots(1, 2)
    for steps, values in curves_of(rows):
        losses.plot(steps, values, lw=0.5, color="0.6", zorder=1)  # below the smooth ones of all
        width = max(len(values) // 50, 1)
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        losses.plot(steps[width - 1 :], smooth, color="C0")
    losses.set(xlabel="step", ylabel="training loss (augmented images)")
    epochs = [r["epoch"] for r in tests]
    accuracies.plot(epochs, [100 * r["top1"] for r in tests], label="trained weights")
    if all("ema" in r for r in tests):
        averages = [100 * r["ema"]["top1"] for r in tests]
        accuracies.plot(epochs, averages, label="their moving average")
    if all("validation" in r for r in tests):
        validated = [100 * r["validation"]["top1"] for r in tests]
        accuracies.plot(epochs, validated, ls=":", label=_VALIDATION)
    for i, (name, top1, top5) in enumerate(scores):
        if top5 is None:
            accuracies.axhline(100 * top1, ls="--", color=f"C{i}", label=name)
    accuracies.set(xlabel="epoch", ylabel="top-1 of test images, %", ylim=(0, None))
    accuracies.xaxis.get_major_locator().set_params(integer=True)
    accuracies.grid(alpha=0.3)
    accuracies.legend(loc="lower right")
    figure.savefig(path, dpi=120)
