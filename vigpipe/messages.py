"""Print sentences for the user on stderr, whatever others have put into them.

Sentences quote file names, class names, options, metadata, manifests, profiles and the environment.
Every error and note goes through `tell`, so that no place that words one has to think of that; and
`safe_streams` lets every place print, whatever stdout and stderr are.
"""

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Iterator
from typing import Any

from vigpipe.errors import DONE, NOBODY_READS, WRONG_INPUT
from vigpipe.files.names import escaped, shortened

_program = ["vigpipe"]  # what the user has called
LONGEST_WORD = 300  # a name in a path has at most 255 bytes
LONGEST_SENTENCE = 3000  # weights that do not fit a model are a sentence of some 2,000 characters


def name_program(words: str) -> None:
    """Note what the user has called: vigpipe, or python -m and another package's name."""
    _program[:] = words.split()


def program() -> list[str]:
    """Return the words of what the user has called."""
    return list(_program)


def one_line(sentence: str) -> str:
    r"""Make a sentence safe to print on one line; leave out the middle of what is too long.

    Characters that a terminal acts upon are written as \x1b, \n or \u202e.
    """
    words = re.sub(r"\S+", lambda word: shortened(word[0], LONGEST_WORD), sentence)
    return escaped(words, LONGEST_SENTENCE)


def plural(number: int, noun: str) -> str:
    """Count what a noun names: 1 stage, 1,024 epochs, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def line(sentence: str) -> str:
    """Return the line that `tell` prints, with the newline at its end."""
    return f"vigpipe: {one_line(sentence)}\n"


def tell(sentence: str) -> None:
    """Print a sentence on stderr, as one line in one call, so that ranks do not mix theirs."""
    sys.stderr.write(line(sentence))
    sys.stderr.flush()


class Stream(io.RawIOBase):
    """The bytes of stdout or stderr: what cannot be written is left out, and told of once."""

    error: OSError | None = None  # why the rest is left out

    def __init__(self, name: str, descriptor: int) -> None:
        self.name, self._descriptor = name, descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, content: Any) -> int:
        left = memoryview(content)
        while left and self.error is None:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # a pipe whose other end does not let writers wait
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = error
                if self.name == "stdout" and not isinstance(error, BrokenPipeError):
                    tell(
                        f"stdout: cannot be written ({error.strerror}), so that the rest of it is "
                        "left out; give it another file, or make room"
                    )
        return memoryview(content).nbytes

    def exit_code(self) -> int:
        """Return the code of a command whose result is what it has printed."""
        if self.error is None:
            return DONE
        return NOBODY_READS if isinstance(self.error, BrokenPipeError) else WRONG_INPUT


@contextlib.contextmanager
def safe_streams() -> Iterator[Stream]:
    r"""Let this process print any text on stdout and stderr, closed, full or ASCII; yield stdout.

    Characters that an encoding lacks are written as \xd7. A stream that is closed, or that Python's
    caller has replaced, as notebooks do, is left as it is.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: else the next file that is opened would be taken for it
            nothing = os.open(os.devnull, os.O_RDONLY)  # so that writing is an error
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            os.set_inheritable(descriptor, True)  # dup2 onto itself would not make it so
    streams = [Stream("stdout", 1), Stream("stderr", 2)]
    before = {stream.name: getattr(sys, stream.name) for stream in streams}
    for stream in streams:
        old = before[stream.name]
        if old is not getattr(sys, f"__{stream.name}__"):
            continue
        unbuffered = old is not None and old.write_through
        new = io.TextIOWrapper(
            stream if unbuffered else io.BufferedWriter(stream),
            encoding="utf-8" if old is None else old.encoding,
            errors="backslashreplace",
            line_buffering=old is None or old.line_buffering,
            write_through=unbuffered,
        )
        setattr(sys, stream.name, new)
    try:
        yield streams[0]
        sys.stdout.flush()
    finally:
        for name, old in before.items():
            setattr(sys, name, old)
