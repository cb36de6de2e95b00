"""A table of what is refused, with the words of each message."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def assert_refused(attempt: Callable[[Any], object], table: Iterable[tuple[Any, str]]) -> None:
    """Each row is refused with a ValueError whose words match; all other rows are told."""
    wrong = []
    for row, words in table:
        try:
            attempt(row)
        except ValueError as error:
            if not re.search(words, str(error)):
                wrong.append(f"{row}: {error}")
        else:
            wrong.append(f"{row}: is not refused")
    assert not wrong, "\n".join(wrong)
