"""Tables of what is refused: every row is tried, and all that are wrong are told."""

import re
from collections.abc import Callable, Iterable

from vigpipe.errors import InputError


def assert_refused(rows: Iterable[tuple[Callable[[], object], str]]) -> None:
    """Each attempt ends in one sentence with these words, a regular expression."""
    wrong = []
    for attempt, words in rows:
        try:
            attempt()
            told = "nothing"
        except InputError as error:
            told = str(error)
        if not re.search(words, told) or not told.isprintable():
            wrong.append(f"{told!r} is told instead of {words!r}")
    assert not wrong, "\n".join(wrong)
