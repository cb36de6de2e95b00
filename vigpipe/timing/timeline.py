"""Draw the timeline of a step: one row per rank, with what the rank did and when."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vigpipe.files.atomic import save_figure
from vigpipe.files.figures import matplotlib_defaults
from vigpipe.spans import Span, by_rank, step_seconds
from vigpipe.timing.boxes import by_look, explanation, label, places_of_stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MADE_BY = "vigpipe timeline"
_NARROWEST_NUMBERED = 0.012  # share of the picture's width; narrower boxes hold no number
_MOST_LEGEND_COLUMNS = 9
_HATCH_COLOUR = "#6b6b6b"


@matplotlib_defaults()
def draw_timeline(timelines: Mapping[str, Sequence[Span]], paths: Sequence[Path]) -> None:
    """Draw several steps, by the titles of their panels, on a common scale of time.

    The suffix of a path gives the format: .png, .svg or .pdf.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_rows = [len(by_rank(spans)) for spans in timelines.values()]
    figure = Figure(figsize=(14, 1.8 + 0.9 * len(num_rows) + 0.42 * sum(num_rows)))
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(num_rows), sharex=True, squeeze=False, height_ratios=[n + 1 for n in num_rows]
    )[:, 0]
    longest = max(map(step_seconds, timelines.values()))
    unit, name = (1e3, "ms") if longest < 10 else (1.0, "s")
    every_span = [span for spans in timelines.values() for span in spans]
    places = places_of_stages(every_span)
    with rc_context({"hatch.linewidth": 0.5}):
        for panel, (title, spans) in zip(panels, timelines.items(), strict=True):
            _draw_step(panel, spans, places, unit, _NARROWEST_NUMBERED * longest)
            panel.set_title(
                f"{title}: {step_seconds(spans) * unit:.4g} {name}",
                loc="left",
                fontsize=10,
                parse_math=False,
            )
        keys = [
            Patch(
                facecolor=look.colour,
                edgecolor=_HATCH_COLOUR if look.hatch else look.colour,
                hatch=3 * look.hatch,
                label=look.name,
                linewidth=0.4,
            )
            for look in by_look(every_span, places)
        ]
    panels[-1].set_xlabel(f"{name} since the first rank began")
    rows = -(-len(keys) // _MOST_LEGEND_COLUMNS)
    figure.legend(
        title=explanation(places),
        handles=keys,
        loc="outside lower center",
        ncols=-(-len(keys) // rows),
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )
    for path in paths:
        save_figure(figure, path, MADE_BY, dpi=130)


def _draw_step(
    panel: "Axes",
    spans: Sequence[Span],
    places: Mapping[int, int],
    unit: float,
    narrowest: float,
) -> None:
    """Draw the boxes of one step, and the text in those that last `narrowest` seconds or more."""
    begin = min(span.start for span in spans)
    ranks = by_rank(spans)
    for row, rank_spans in enumerate(ranks.values()):
        for look, alike in by_look(rank_spans, places).items():
            panel.broken_barh(
                [((span.start - begin) * unit, span.seconds * unit) for span in alike],
                (row - 0.4, 0.8),
                facecolors=look.colour,
                edgecolors=_HATCH_COLOUR if look.hatch else "white",
                hatch=3 * look.hatch,
                linewidth=0.4,
            )
        for span in rank_spans:
            lines = label(span, places)
            if lines and span.seconds > narrowest:
                panel.text(
                    ((span.start + span.end) / 2 - begin) * unit,
                    row,
                    "\n".join(lines),
                    ha="center",
                    va="center",
                    fontsize=8,
                    linespacing=1.0,
                    clip_on=True,
                )
    panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    panel.set_ylim(len(ranks) - 0.5, -0.5)
    panel.spines[["top", "right", "left"]].set_visible(False)
