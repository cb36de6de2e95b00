"""Tables of rows on the page."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vigpipe.report.markup import NOTHING, paragraph, table
from vigpipe.selftest.rows import Outcome, Row

WORDS = {"passed": "passed", "failed": "FAILED", "measured": "", "skipped": "skipped"}


class Column(NamedTuple):
    """A column of a table: its heading, the name of its values in the rows, and their format."""

    head: str
    key: str
    form: str | Callable[[Any], str]


def rows_table(
    head: str, rows: Sequence[Row], columns: Sequence[Column], *, style: str = ""
) -> str:
    """Make a table with one line per row; below it stand the notes of the rows."""
    lines = [
        [row.what, WORDS[row.outcome], *(_cell(row, column) for column in columns)] for row in rows
    ]
    heads = [head, "", *(column.head for column in columns)]
    return "\n".join([table(heads, lines, num_names=2, style=style), *_notes(rows)])


def _notes(rows: Sequence[Row]) -> list[str]:
    """Write every note once, behind all the rows that have it."""
    by_note: dict[tuple[str, Outcome], list[str]] = {}
    for row in rows:
        if row.note:
            by_note.setdefault((row.note, row.outcome), []).append(row.what)
    return [
        paragraph(f"{'; '.join(names)}: {note}.", "warning" if outcome == "failed" else "note")
        for (note, outcome), names in by_note.items()
    ]


def _cell(row: Row, column: Column) -> str:
    value = row.values.get(column.key)
    if value is None:
        return NOTHING
    return column.form.format(value) if isinstance(column.form, str) else column.form(value)
