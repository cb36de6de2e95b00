"""Draw where the time of a step goes: accounts of ranks, pieces of the model, timelines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vigpipe.analysis.account import PARTS, Account
from vigpipe.replication.diary import Deed
from vigpipe.report.markup import escape
from vigpipe.report.replica_files import Doing
from vigpipe.report.timing_files import Timeline
from vigpipe.spans import Span, SpanKind
from vigpipe.timing.boxes import COLOURS, HATCHES, Look, by_look, label, places_of_stages

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PART_COLOURS = {"compute": COLOURS["forward"], "unaccounted": "#0072b2", **COLOURS}
PIECE_COLOURS = {
    "kNN": "#d55e00",
    "aggregation": "#e69f00",
    "rest of the Grapher": "#f0e442",
    "FFN": "#56b4e9",
    "update": "#0072b2",
    "rest of the block": "#dddddd",
    "whole": "#999999",
}
DEED_COLOURS: dict[Deed, str] = {
    "worked": COLOURS["forward"],
    "waited": COLOURS["wait input"],
    "averaged": COLOURS["all-reduce"],
    "evaluated": COLOURS["optimizer"],
    "saved": COLOURS["other"],
}
TEXT_COLOUR = "#111111"  # readable in boxes of all these colours
SMALLEST_TEXT = 10  # pixels; a number that would be smaller in its box is left out
ROW_PIXELS, FEWEST_ROW_PIXELS = 46, 22
LEGEND_ROW, LEGEND_ROW_PIXELS = 9, 25  # entries that fit into one row, and its height
TWO_LINE_PIXELS = 36  # a row that is lower has room for the first line of a box only
BUTTONS = ("zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage")
_EDGE = {"width": 0.5, "color": "rgba(0, 0, 0, 0.35)"}
_INSIDE = {  # text within a bar, upright
    "textposition": "inside",
    "insidetextanchor": "middle",
    "textangle": 0,
    "textfont": {"size": 11, "color": TEXT_COLOUR},
}


def account_chart(accounts: Sequence[Account]) -> "Figure":
    """Draw where the time of a step goes, with one bar per rank."""
    from plotly.graph_objects import Figure

    figure = Figure()
    names = [f"rank {account.rank}" for account in accounts]
    for part in PARTS:
        values = [1e3 * account.seconds[part] for account in accounts]
        shares = [100 * a.seconds[part] / a.step_seconds if a.step_seconds else 0 for a in accounts]
        figure.add_bar(
            name=part,
            orientation="h",
            y=names,
            x=values,
            text=[f"{share:.0f} %" for share in shares],
            marker=_marker(PART_COLOURS[part], HATCHES.get(part, "")),
            hovertemplate=f"%{{y}}, {part}<br>%{{x:.3f}} ms, %{{text}}<extra></extra>",
            **_INSIDE,
        )
    figure.update_layout(barmode="relative", xaxis_title="milliseconds a step (means)")
    figure.update_yaxes(autorange="reversed", fixedrange=True)
    return styled(figure, height=130 + ROW_PIXELS * len(accounts))


def replica_chart(doings: Sequence[Doing], num_replicas: int) -> "Figure":
    """Draw what each replica did when, with one row per replica, and the last for a server."""
    from plotly.graph_objects import Figure

    def name(replica: int) -> str:
        return f"replica {replica}" if replica < num_replicas else "server"

    figure = Figure()
    for deed, colour in DEED_COLOURS.items():
        alike = [doing for doing in doings if doing.deed == deed]
        if not alike:
            continue
        seconds = [doing.end - doing.start for doing in alike]
        figure.add_bar(
            name=deed,
            orientation="h",
            y=[doing.replica for doing in alike],
            base=[doing.start for doing in alike],
            x=seconds,
            width=0.88,
            marker=_marker(colour, HATCHES["wait input"] if deed == "waited" else ""),
            hovertext=[
                f"{name(d.replica)} {deed}<br>{d.start:.3f} – {d.end:.3f} s, {s:.3f} long"
                for d, s in zip(alike, seconds, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    replicas = sorted({doing.replica for doing in doings})
    figure.update_layout(barmode="overlay", hovermode="closest", dragmode="zoom")
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(**_rows_axis(replicas, list(map(name, replicas))))
    return styled(figure, height=130 + ROW_PIXELS * len(replicas))


def piece_chart(stacked: Mapping[SpanKind, Mapping[str, Mapping[str, float]]]) -> "Figure":
    """Draw `durations.stacked_medians` by direction: a panel for each, with a column per piece."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=len(stacked), subplot_titles=list(stacked), shared_yaxes=True
    )
    in_legend: set[str] = set()
    for column, parts in enumerate(stacked.values(), 1):
        for part, colour in PIECE_COLOURS.items():
            by_piece = parts.get(part, {})
            if by_piece:
                figure.add_bar(
                    name=part,
                    x=[escape(piece.removeprefix("block ")) for piece in by_piece],
                    y=[1e3 * seconds for seconds in by_piece.values()],
                    marker={"color": colour, "line": _EDGE},
                    legendgroup=part,
                    showlegend=part not in in_legend,
                    hovertemplate=f"%{{x}}, {part}: %{{y:.3f}} ms<extra></extra>",
                    row=1,
                    col=column,
                )
                in_legend.add(part)
        pieces = dict.fromkeys(piece for by_piece in parts.values() for piece in by_piece)
        order = sorted([escape(piece.removeprefix("block ")) for piece in pieces], key=_place)
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=order, col=column)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="ms a step (medians)", col=1)
    return styled(figure, height=400)


def timeline_chart(timeline: Timeline) -> "Figure":
    """Draw the measured timeline above the predicted one, with one row per rank."""
    from plotly.subplots import make_subplots

    panels = [timeline.measured, *([timeline.predicted] if timeline.predicted else [])]
    ranks = [sorted({span.rank for span in spans}) for spans in panels]
    titles = [f"measured, step {timeline.step}", "predicted"]
    if len(ranks[-1]) < len(ranks[0]):  # all replicas do the same, so only one is predicted
        titles[1] += ", one replica"
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        subplot_titles=titles[: len(panels)],
        row_heights=[max(len(panel_ranks), 1) for panel_ranks in ranks],
        vertical_spacing=0.15 if len(panels) > 1 else 0,
    )
    pixels = max(FEWEST_ROW_PIXELS, min(ROW_PIXELS, 500 // max(len(ranks[0]), 1)))
    most_lines = 2 if pixels >= TWO_LINE_PIXELS else 1
    places = places_of_stages(span for spans in panels for span in spans)
    in_legend: set[Look] = set()
    for row, spans in enumerate(panels, 1):
        begin = min(span.start for span in spans) if spans else 0.0
        # All boxes that look alike are a single trace, which keeps thousands of them fluent.
        for look, alike in by_look(spans, places).items():
            texts = ["<br>".join(label(span, places)[:most_lines]) for span in alike]
            figure.add_bar(
                name=look.name,
                orientation="h",
                y=[span.rank for span in alike],
                base=[1e3 * (span.start - begin) for span in alike],
                x=[1e3 * span.seconds for span in alike],
                width=0.88,  # plotly would derive it from the distance of a trace's rows
                text=texts if any(texts) else None,
                hovertext=[_hover_text(span, begin) for span in alike],
                hovertemplate="%{hovertext}<extra></extra>",
                marker=_marker(look.colour, look.hatch),
                legendgroup=look.name,
                showlegend=look not in in_legend,
                row=row,
                col=1,
                **_INSIDE,
            )
            in_legend.add(look)
    figure.update_layout(barmode="overlay", hovermode="closest", dragmode="zoom")
    for row, panel_ranks in enumerate(ranks, 1):
        names = [f"rank {rank}" for rank in panel_ranks]
        figure.update_yaxes(**_rows_axis(panel_ranks, names), row=row, col=1)
    figure.update_xaxes(zeroline=False)
    figure.update_xaxes(title_text="milliseconds since the step began", row=len(panels), col=1)
    more = LEGEND_ROW_PIXELS * (len(in_legend) > LEGEND_ROW)
    height = 150 + 60 * len(panels) + pixels * sum(map(len, ranks)) + more
    return styled(figure, height, top=60 + more)


def _rows_axis(rows: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Describe the axis of a chart of boxes: a name for each row, the first row at the top."""
    return {
        "tickvals": rows,
        "ticktext": names,
        "range": [max(rows, default=0) + 0.5, min(rows, default=0) - 0.5],
        "fixedrange": True,
        "showgrid": False,
    }


def _marker(colour: str, hatch: str) -> dict[str, object]:
    """Colour a bar and hatch it; a hatch without a colour of its own shows the page behind it."""
    if not hatch:
        return {"color": colour, "line": _EDGE}
    pattern = {"shape": hatch, "bgcolor": colour, "fgcolor": "#6b6b6b", "solidity": 0.12}
    return {"color": colour, "line": _EDGE, "pattern": pattern}


def _hover_text(span: Span, begin: float) -> str:
    words = [f"rank {span.rank}: {span.kind}"]
    words += [f"stage {span.stage}"] * (span.stage >= 0)
    words += [f"micro-batch {span.microbatch}"] * (span.microbatch >= 0)
    start, end = 1e3 * (span.start - begin), 1e3 * (span.end - begin)
    return f"{', '.join(words)}<br>{start:.3f} – {end:.3f} ms, {end - start:.3f} long"


def styled(figure: "Figure", height: int, top: int = 60) -> "Figure":
    """Set size, in pixels, and background of a chart; the page's style sheet colours the rest."""
    figure.update_layout(
        template="none",
        height=height,
        paper_bgcolor="rgba(0, 0, 0, 0)",
        plot_bgcolor="rgba(0, 0, 0, 0)",
        margin={"l": 70, "r": 45, "t": top, "b": 50},
        legend={
            **{"orientation": "h", "x": 0, "y": 1, "yanchor": "top", "yref": "container"},
            # On a narrow page plotly makes room for the legend's rows, but not for the titles of
            # the panels below them: an edge that is not seen keeps them apart.
            "borderwidth": 12 if figure.layout["annotations"] else 0,
            "bordercolor": "rgba(0, 0, 0, 0)",
        },
        modebar={
            "orientation": "v",  # the buttons stand beside the chart, the legend above it
            "bgcolor": "rgba(0, 0, 0, 0)",
            "color": "#8d8d8d",
            "activecolor": "#0072b2",
        },
        font={"family": "system-ui, sans-serif", "size": 13},
        showlegend=True,
        uniformtext={"minsize": SMALLEST_TEXT, "mode": "hide"},
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure


def as_html(figure: "Figure", name: str) -> str:
    """Make the HTML of a chart whose element has the id `chart-<name>`."""
    from plotly.io import to_html

    return to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,  # the page's head has it once
        div_id=f"chart-{name}",
        default_height="auto",
        config={"responsive": True, "displaylogo": False, "modeBarButtons": [list(BUTTONS)]},
    )


def _place(piece: str) -> tuple[int, int]:
    """Return the key by which pieces are sorted: the stem, the blocks by number, the others."""
    return (1, int(piece)) if piece.isdigit() else (0 if piece == "stem" else 2, 0)
