"""Draw the loss curves of all layouts, and their distance from the sequential one."""

from pathlib import Path

from benchmarks.study.claims import relative_differences
from benchmarks.study.configs import SEQUENTIAL
from benchmarks.study.outcome import Outcome
from vigpipe.parallel.layout import Layout

# Okabe and Ito's colours, told apart by colour-blind readers too; one for each number of
# micro-batches, because layouts with the same number should coincide.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def draw_losses(outcome: Outcome, path: Path) -> None:
    """Draw the losses of the first round.

    Curves of layouts with the same micro-batches should coincide. So that all stay visible, one
    stage is a broad pale line, two stages are a thin line, more stages are crosses, and copies are
    dots.

    Args:
        outcome: the runs.
        path: the picture to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, distances = figure.subplots(1, 2)
    counts = sorted({_total_microbatches(layout) for layout in outcome.layouts.values()})
    colours = dict(zip([n for n in counts if n > 1], _COLOURS * len(counts), strict=False))
    first = {name: runs[0].losses for name, runs in outcome.runs.items()}
    order = {name: index for index, name in enumerate(outcome.layouts)}
    longest = max(len(losses_of_run) for losses_of_run in first.values())
    for name, layout in outcome.layouts.items():
        style = {"color": colours.get(_total_microbatches(layout), "black"), "label": name}
        if layout.world_size == 1:
            style |= {"lw": 5, "alpha": 0.3} if _total_microbatches(layout) > 1 else {"lw": 1.5}
        elif layout.num_replicas == 1 and layout.pipeline_size == 2:
            style |= {"lw": 1.2}
        else:
            apart = max(1, longest // 12)
            marker = "x" if layout.num_replicas == 1 else "o"
            style |= {"lw": 0, "marker": marker, "ms": 5}
            style |= {"markevery": (order[name] % apart, apart)}
        steps = sorted(first[name])
        losses.plot(steps, [first[name][step] for step in steps], **style)
        if SEQUENTIAL in first and name != SEQUENTIAL:
            relative = relative_differences(first[name], first[SEQUENTIAL])
            distances.plot(steps, [relative[step] for step in steps], **style)
    losses.set(xlabel="step", ylabel="training loss", title="loss, first round")
    distances.set(
        xlabel="step",
        ylabel="relative difference",
        title="distance to the whole mini-batch on one stage",
    )
    distances.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    if SEQUENTIAL not in first or len(first) == 1:
        distances.text(0.5, 0.5, "nothing to compare", ha="center", transform=distances.transAxes)
    for panel in (losses, distances):
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def _total_microbatches(layout: Layout) -> int:
    return layout.num_microbatches * layout.num_replicas
