"""Tables of wrong commands; a row is what is wrong, and words of the one sentence about it."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vigpipe.cli import main

# The command line that is wrong, or the options, and the words.
Row = tuple[Any, ...]


def refused(capsys, *arguments: str, main: Callable[[Sequence[str]], int] = main) -> str:
    """The one sentence that a command is refused with."""
    code = main(arguments)
    stdout, stderr = capsys.readouterr()
    assert code == 2, stderr
    assert stdout == ""
    (line,) = stderr.splitlines()
    return line


def _contents() -> list[Path]:
    """What this folder has, without empty folders."""
    return sorted(path for path in Path().iterdir() if not path.is_dir() or any(path.iterdir()))


def check_commands(
    capsys, verb: str, rows: Iterable[Row], *, main: Callable[[Sequence[str]], int] = main
) -> None:
    """Check that every command is refused in one sentence, and adds no file to this folder.

    Args:
        capsys: pytest's.
        verb: what all command lines begin with.
        rows: the rest of each, as one text or as words, and what its sentence has.
        main: the command line; by default that of vigpipe.
    """
    failures = []
    for rest, *words in rows:
        given = [*shlex.split(verb), *(shlex.split(rest) if isinstance(rest, str) else rest)]
        before = _contents()
        try:
            told = refused(capsys, *given, main=main)
        except Exception as error:
            failures.append(f"{given}: {error!r}")
            continue
        failures += [f"{given}: no {word!r} in {told!r}" for word in words if word not in told]
        if _contents() != before:
            failures.append(f"{given}: it has written a file")
    assert not failures, "\n".join(failures)
