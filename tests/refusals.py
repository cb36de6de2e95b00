"""Tables of what is refused: one test goes through all rows, and tells of every one that fails."""

import re
from collections.abc import Callable, Iterable
from operator import call
from pathlib import Path
from typing import Any

import pytest

from vigpipe.errors import InputError


def check_refusals(
    rows: Iterable[tuple[Any, ...]],
    read: Callable[..., Any] = call,
    begin: str = "",
    *,
    where: Path | str = "",
) -> None:
    """Fail with all rows that are taken, or refused with other words or in more than a line.

    Args:
        rows: what is wrong, and in the end a pattern of what the message says.
        read: refuses what is wrong with an InputError; by default each row has what to call.
        begin: a pattern in front of that of each row.
        where: a file, a folder or an option that every message begins with.
    """
    failures = []
    for number, (*what, words) in enumerate(rows):
        said = "it was taken"
        try:
            read(*what)
        except InputError as error:
            said = str(error)
            is_there = said.startswith(str(where)) and re.search(begin + words, said)
            if is_there and said.isprintable():
                continue
        except Exception as error:
            said = f"{error!r}, where a sentence was expected"
        failures.append(f"row {number}, {words!r}: {said}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
