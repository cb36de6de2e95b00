"""Tables of what is refused: every row is tried, and all rows that fail are told."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError


def check_refused(
    rows: Iterable[tuple[Any, ...]], attempt: Callable[..., Any], where: Path | str = ""
) -> None:
    """Check that each row is refused in one sentence with the words that are expected.

    Args:
        rows: what `attempt` is called with, and last a pattern of the sentence.
        attempt: does what must be refused.
        where: a file, a folder or an option that every sentence begins with.
    """
    failures = []
    for *wrong, pattern in rows:
        try:
            attempt(*wrong)
            told = "not refused"
        except InputError as error:
            told = str(error)
            if told.startswith(str(where)) and "\n" not in told and re.search(pattern, told):
                continue
        except Exception as error:
            told = repr(error)
        failures.append(f"{str(wrong)[:200]}\n  expected: {pattern}\n  told: {told}")
    assert not failures, "\n".join(failures)


@contextmanager
def restored(*paths: Path) -> Iterator[None]:
    """Let files be changed, and write them as they were when that is over."""
    contents = [(path, path.read_bytes()) for path in paths]
    try:
        yield
    finally:
        for path, content in contents:
            path.write_bytes(content)
