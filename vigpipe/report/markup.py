"""Text and tables as HTML; everything passes through `escape`, for it may come from any file."""

import html
from collections.abc import Sequence

from vigpipe.timing.tables import Statistics

NOTHING = "–"  # where there is no value


def escape(text: str) -> str:
    """Text that shows as it is, in HTML and in a label of plotly, which takes a few tags too."""
    return html.escape(text, quote=False)


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(style)}>{escape(text)}</p>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], num_names: int = 1, style: str = ""
) -> str:
    """A table of plain text that scrolls sideways where the window is narrow.

    Args:
        head: a cell a column.
        rows: as long as the head.
        num_names: columns at the left that name the row; the others are values.
        style: CSS class of the table.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_class('name' if i < num_names else '')}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="wide"><table{_class(style)}><thead><tr>{line(head, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def statistics_table(rows: Sequence[tuple[str, str, Statistics]]) -> str:
    """Milliseconds of everything that was timed; a name stands in the first of its rows only."""
    cells = []
    before = None
    for name, direction, s in rows:
        numbers = (s.mean, s.std, s.min, s.max, s.median, s.p95)
        shown = "" if name == before else name
        cells.append([shown, direction, *map(milliseconds, numbers), str(s.count)])
        before = name
    head = ["", "", "mean", "std", "min", "max", "median", "p95", "count"]
    return table(head, cells, num_names=2)


def folded(title: str, content: str) -> str:
    """Something long behind a line to click on."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{1e3 * seconds:,.3f}"


def share(value: float | None) -> str:
    """A share as per cent."""
    return NOTHING if value is None else f"{value:.1%}".replace("-", "−")


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""
