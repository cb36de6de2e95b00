"""Draw the timeline of a step: one row per rank, with what the rank did and when."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vigpipe.files.atomic import save_figure
from vigpipe.spans import KINDS, Kind, Span, by_rank, step_seconds

MADE_BY = "vigpipe timeline"
# Okabe and Ito's colours, told apart by colour-blind readers too; waiting stays in the background.
COLOURS: dict[Kind, str] = {
    "forward": "#56b4e9",
    "backward": "#009e73",
    "wait input": "#eeeeee",
    "wait gradient": "#dddddd",
    "wait end": "#cccccc",
    "send": "#f0e442",
    "all-reduce": "#d55e00",
    "optimizer": "#cc79a7",
    "other": "#999999",
}
_NARROWEST_NUMBERED = 0.012  # share of the picture's width; narrower boxes hold no number


def draw_timeline(timelines: Mapping[str, Sequence[Span]], paths: Sequence[Path]) -> None:
    """Draw several steps one below the other, on a common scale of time.

    Args:
        timelines: spans of each step, by the title of its panel.
        paths: files to write or replace; the suffix gives the format: .png, .svg or .pdf.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_rows = [len(by_rank(spans)) for spans in timelines.values()]
    figure = Figure(figsize=(14, 1.4 + 0.9 * len(num_rows) + 0.42 * sum(num_rows)))
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(num_rows), sharex=True, squeeze=False, height_ratios=[n + 1 for n in num_rows]
    )[:, 0]
    longest = max(map(step_seconds, timelines.values()))
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    for panel, (title, spans) in zip(panels, timelines.items(), strict=True):
        begin = min(span.start for span in spans)
        ranks = by_rank(spans)
        for row, rank_spans in enumerate(ranks.values()):
            panel.broken_barh(
                [((span.start - begin) * unit, span.seconds * unit) for span in rank_spans],
                (row - 0.4, 0.8),
                facecolors=[COLOURS[span.kind] for span in rank_spans],
                edgecolors="white",
                linewidth=0.4,
            )
            for span in rank_spans:
                is_numbered = span.microbatch >= 0 and span.kind in ("forward", "backward")
                if is_numbered and span.seconds > _NARROWEST_NUMBERED * longest:
                    panel.text(
                        ((span.start + span.end) / 2 - begin) * unit,
                        row,
                        str(span.microbatch),
                        ha="center",
                        va="center",
                        fontsize=8,
                        clip_on=True,
                    )
        panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        panel.set_ylim(len(ranks) - 0.5, -0.5)
        panel.set_title(
            f"{title}: {step_seconds(spans) * unit:.4g} {name}", loc="left", fontsize=10
        )
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(f"{name} since the first rank began")
    used = {span.kind for spans in timelines.values() for span in spans}
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in KINDS if kind in used],
        loc="outside lower center",
        ncols=len(KINDS),
        frameon=False,
        fontsize=9,
    )
    for path in paths:
        save_figure(figure, path, MADE_BY, dpi=130)
