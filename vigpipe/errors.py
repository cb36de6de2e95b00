"""Define the errors that users meet, and the exit codes of all commands."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

DONE = 0
# `vigpipe check` found a difference; this is also Python's code for an unexpected exception.
DIFFERS = 1
WRONG_INPUT = 2  # wrong use or wrong input, see InputError
PEER_LOST = 70  # another rank, or a process that reads images, is gone or silent
SAVED = 75  # stopped before the end with a checkpoint; start the run again to continue
NOT_FINITE = 76  # the loss is NaN or infinite
INTERRUPTED = 130  # 128 + SIGINT
NOBODY_READS = 141  # 128 + SIGPIPE: the reader of the output is gone


class InputError(ValueError):
    """Wrong use or wrong input, described in one sentence.

    The sentence says what is wrong and where, what was expected and found, and what to change.
    Commands print it to stderr without a traceback and exit with code 2.
    """

    # Who finds it, of the ranks of a job: this one, all of a host, or all.
    found_by: Literal["rank", "host", "job"] = "rank"


@contextmanager
def found_by(who: Literal["host", "job"]) -> Iterator[None]:
    """Note who finds the errors of this context."""
    try:
        yield
    except InputError as error:
        if not isinstance(error, TooLarge):  # memory is this rank's alone
            error.found_by = who
        raise


class TooLarge(InputError):
    """Memory ran out while a file was read, which is the file's fault or the machine's."""


class UnreadableImage(InputError):
    """One image of many cannot be read: commands with --skip-bad-images add that to the advice."""


class WorkerError(RuntimeError):
    """A process that works for this rank is gone or silent, described in one sentence."""


class StrangerError(RuntimeError):
    """A process that does not know the secret of the run does what only its ranks may do."""


class PeerLostError(RuntimeError):
    """Another rank is gone or silent, as vigpipe itself has found."""


class UnreachableError(RuntimeError):
    """Ranks cannot be connected, described in one sentence."""


class TrainingError(RuntimeError):
    """A training that was started from Python has ended without a result.

    Attributes:
        code: exit code of its process, negative for a signal; docs/faults.md lists them.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return self.args[0]
