"""Let faults happen to runs one after the other, and print a table of what was seen."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.hosts import some_hosts
from tests.small_digits import among_small_digits


class Row(NamedTuple):
    """What was seen of a fault."""

    cells: Sequence[object]
    is_right: bool
    details: str  # for stderr, if it is not right


class Case(NamedTuple):
    """A fault that happens to a run whose files are in a new folder."""

    suffer: Callable[[Path], Row]
    num_hosts: int  # of slurm/hosts.sh that it needs; 0 for this machine itself


def print_table(heads: Sequence[str], cases: Mapping[str, Case], words: Sequence[str]) -> int:
    """Print the rows of all cases whose name has one of the words, if there are any.

    Return 1 if a row is not right, or no name has a word.
    """
    chosen = [
        case for name, case in cases.items() if not words or any(word in name for word in words)
    ]
    wrong = 0
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(among_small_digits(folder))
        if count := max((case.num_hosts for case in chosen), default=0):
            os.environ.update(stack.enter_context(some_hosts(folder, count=count)))
        for number, case in enumerate(chosen):
            row = case.suffer(folder / str(number))
            wrong += not row.is_right
            print(f"| {' | '.join(map(str, row.cells))} |", flush=True)
            if not row.is_right:
                print(row.details, file=sys.stderr, flush=True)
    return int(wrong > 0 or not chosen)
