"""Write text and tables as HTML, escaped, because the text may come from any file."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from vigpipe.timing.tables import Statistics

NOTHING = "–"  # where there is no value


class Shortened(NamedTuple):
    """A cell that shows the beginning of a text; the whole appears under a resting mouse."""

    text: str
    whole: str


Cell = str | Shortened


def escape(text: str) -> str:
    """Escape text for HTML and for labels of plotly, which interpret a few tags too."""
    return html.escape(text, quote=False)


def paragraph(text: str, style: str = "") -> str:
    """Make a paragraph of plain text with an optional CSS class."""
    return f"<p{_class(style)}>{escape(text)}</p>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[Cell]], num_names: int = 1, style: str = ""
) -> str:
    """Make a table of plain text whose first `num_names` columns name the row."""

    def line(cells: Sequence[Cell], tag: str) -> str:
        return "".join(
            f"<{tag}{_class('name' if i < num_names else '')}{_title(cell)}>"
            f"{escape(cell.text if isinstance(cell, Shortened) else cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="wide"><table{_class(style)}><thead><tr>{line(head, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def statistics_table(rows: Sequence[tuple[str, str, Statistics]]) -> str:
    """Make a table of statistics in milliseconds; a name is shown in the first of its rows only."""
    cells = []
    previous_name = None
    for name, direction, s in rows:
        numbers = (s.mean, s.std, s.min, s.max, s.median, s.p95)
        cell = "" if name == previous_name else name
        cells.append([cell, direction, *map(milliseconds, numbers), str(s.count)])
        previous_name = name
    head = ["", "", "mean", "std", "min", "max", "median", "p95", "count"]
    return table(head, cells, num_names=2)


def folded(title: str, content: str) -> str:
    """Hide long content behind a title that opens it with a click."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds."""
    return f"{1e3 * seconds:,.3f}"


def share(value: float) -> str:
    """Write a share of 1 in per cent."""
    return f"{value:.1%}".replace("-", "−")


def size(num_bytes: float) -> str:
    """Write bytes in GB, MB or kB, whichever fits the number."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _title(cell: Cell) -> str:
    return f' title="{html.escape(cell.whole)}"' if isinstance(cell, Shortened) else ""


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""
