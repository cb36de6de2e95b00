"""Draw how runs learn: loss, accuracy, learning rate and throughput over their steps."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vigpipe.job.score import name_of
from vigpipe.report.charts import styled
from vigpipe.report.markup import escape
from vigpipe.report.read import Evaluation, ReportedRun, StepMetrics

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
MOST_POINTS = 1000  # nobody could see more of them in a line
OTHER_DASHES = {"top5": "dot", "macro_f1": "dot", "micro_f1": "longdash"}  # the main share is solid
_Values = Sequence[tuple[StepMetrics | Evaluation, float | None]]  # None: not told


class _Point(NamedTuple):
    step: float
    epoch: float
    value: float


def loss_chart(runs: Sequence[ReportedRun]) -> "Figure":
    """Draw the training loss of steps and epochs, and the losses of the evaluations."""
    lines = []
    for i, run in enumerate(runs):
        rows = run.evaluations
        for replica, steps in sorted(run.steps_of_others.items()):
            losses = [(step, step.loss) for step in _join_small_batches(steps)]
            lines.append(_line(runs, i, f"training, replica {replica}", losses, faint=True))
        of_epochs = [(row, row.training_loss) for row in rows]
        of_validation = [(row, row.validation.loss if row.validation else None) for row in rows]
        lines += [
            _line(runs, i, "training", [(s, s.loss) for s in _join_small_batches(run.steps)]),
            _line(runs, i, "training, mean of the epoch", of_epochs, dash="dash"),
            _line(runs, i, "test", [(row, row.test.loss) for row in rows], dash="dot"),
            _line(runs, i, "validation", of_validation, dash="dashdot"),
        ]
    return _curves(lines, "loss")


def accuracy_chart(runs: Sequence[ReportedRun]) -> "Figure":
    """Draw the shares of the test samples, and the main one of the validation samples."""
    lines = []
    for i, run in enumerate(runs):
        rows = run.evaluations
        if not rows:
            continue
        main, *others = run.told_shares
        tested = [row.test for row in rows]
        validated = [row.validation for row in rows]
        kinds = [(f"test {name_of(main)}", "solid", [score.main for score in tested])]
        for name in others:
            shares = [score.shares[name] for score in tested]
            kinds.append((f"test {name_of(name)}", OTHER_DASHES[name], shares))
        of_test = [score.average for score in tested]
        of_validation = [score.average if score else None for score in validated]
        kinds += [
            (f"test {name_of(main)}, moving average", "dash", of_test),
            (f"validation {name_of(main)}", "dashdot", [s.main if s else None for s in validated]),
            (f"validation {name_of(main)}, moving average", "longdashdot", of_validation),
        ]
        for what, dash, shares in kinds:
            percents = [None if share is None else 100 * share for share in shares]
            lines.append(_line(runs, i, what, list(zip(rows, percents, strict=True)), dash=dash))
    told = dict.fromkeys(name_of(name) for run in runs for name in run.told_shares)
    figure = _curves(lines, f"{', '.join(told)}, %")
    figure.update_yaxes(range=[0, 102])
    return figure


def learning_rate_chart(runs: Sequence[ReportedRun]) -> "Figure":
    """Draw the learning rate of every step."""
    lines = [
        _line(runs, i, "learning rate", [(step, step.lr) for step in run.steps])
        for i, run in enumerate(runs)
    ]
    figure = _curves(lines, "learning rate")
    figure.update_yaxes(rangemode="tozero", exponentformat="power")
    return figure


def throughput_chart(runs: Sequence[ReportedRun]) -> "Figure":
    """Draw the images or nodes per second of every step but those of partial batches."""
    lines = []
    for i, run in enumerate(runs):
        small = partial_batches(run.steps)
        rates = [(s, s.per_second) for n, s in enumerate(run.steps) if n not in small]
        lines.append(_line(runs, i, f"{run.unit}/s", rates))
    units = dict.fromkeys(f"{run.unit}/s" for run in runs if run.steps)
    figure = _curves(lines, " or ".join(units))
    figure.update_yaxes(rangemode="tozero")
    return figure


def partial_batches(steps: Sequence[StepMetrics]) -> set[int]:
    """Find the positions of the steps with partial batches; none if all are such."""
    partial = {i for i, step in enumerate(steps) if step.partial is not None}
    if not partial:  # earlier versions do not tell it
        return small_batches(steps)
    return partial if len(partial) < len(steps) else set()


def small_batches(steps: Sequence[StepMetrics]) -> set[int]:
    """Find the positions of epochs' last batches that have fewer samples than all before them."""
    small: set[int] = set()
    least = math.inf  # samples of all before it in the epoch; batches of sub-graphs are never equal
    for i, step in enumerate(steps):
        is_first = i == 0 or steps[i - 1].epoch != step.epoch
        is_last = i + 1 == len(steps) or steps[i + 1].epoch != step.epoch
        # All numbers of samples are whole up to rounding.
        if is_last and not is_first and 0 < step.samples < least - 0.5:
            small.add(i)
        least = step.samples if is_first else min(least, step.samples)
    return small


def _join_small_batches(steps: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Join smaller last batches with steps before them; a mean of few samples would stand out."""
    small = small_batches(steps)
    joined: list[StepMetrics] = []
    for i, step in enumerate(steps):
        if i in small:
            before = joined.pop()
            loss = before.loss * before.samples + step.loss * step.samples
            step = step._replace(loss=loss / (before.samples + step.samples))
        joined.append(step)
    return joined


def _line(
    runs: Sequence[ReportedRun],
    index: int,
    what: str,
    values: _Values,
    dash: str = "solid",
    *,
    faint: bool = False,
) -> "Scatter | None":
    """Draw one line of a run; the legend names the lines of a single run, or else each run once."""
    from plotly.graph_objects import Scatter

    points = _thinned(
        [
            _Point(row.step if isinstance(row, Evaluation) else row.number, row.epoch, value)
            for row, value in values
            if value is not None
        ]
    )
    if not points:
        return None
    is_alone = len(runs) == 1
    return Scatter(
        name=what if is_alone else escape(runs[index].name),
        legendgroup=what if is_alone else str(index),
        showlegend=is_alone or (dash == "solid" and not faint),
        opacity=0.45 if faint else 1,
        x=[point.step for point in points],
        y=[point.value for point in points],
        customdata=[int(point.epoch) for point in points],
        mode="lines+markers" if len(points) <= 40 else "lines",
        line={"color": RUN_COLOURS[index % len(RUN_COLOURS)], "width": 1.6, "dash": dash},
        marker={"size": 5, "symbol": "diamond" if what.startswith("validation") else "circle"},
        hovertemplate=f"{what}, step %{{x:.0f}}, epoch %{{customdata}}: %{{y:.5g}}"
        f"<extra>{'' if is_alone else '%{fullData.name}'}</extra>",
    )


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    """Average neighbouring points so that at most MOST_POINTS are left."""
    width = -(-len(points) // MOST_POINTS)
    if width <= 1:
        return list(points)
    groups = [np.asarray(points[i : i + width]).mean(0) for i in range(0, len(points), width)]
    return [_Point(*map(float, group)) for group in groups]


def _curves(lines: "Sequence[Scatter | None]", title: str) -> "Figure":
    from plotly.graph_objects import Figure

    figure = Figure([line for line in lines if line is not None])
    figure.update_xaxes(title_text="step", rangemode="tozero")
    figure.update_yaxes(title_text=title)
    styled(figure, height=360)
    return figure.update_layout(legend={"itemwidth": 50})  # long enough to tell dashes apart
