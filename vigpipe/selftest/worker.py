"""Do work in a process of its own, so that a crash or a broken CUDA context ends only that work."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from vigpipe.errors import InputError
from vigpipe.launch.parent_death import die_with_parent

GRACE_SECONDS = 10.0  # a process that has nothing to do is given so long to end
_LONGEST_TAIL = 500  # characters of what a process said last


class OutOfTime(RuntimeError):
    """Work has not ended in time, and was killed."""


class WorkerError(RuntimeError):
    """Work raised an exception, or its process ended."""


class Worker:
    """A fresh process, ended with the context, with one object whose methods are called from here.

    `make`, which must be importable by its name, makes the object in the process.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="vigpipe-worker-")
        self._output = Path(self._folder.name) / "output"
        self._connection, theirs = context.Pipe()
        given = (theirs, str(self._output), os.getpid(), make, arguments)
        self._process = context.Process(target=_serve, args=given)
        self._process.start()
        self._is_busy = False
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def has_ended(self) -> bool:
        return self._connection.closed

    def ask(self, method: str, *arguments: object, seconds: float) -> Any:
        """Call a method of the object and wait for its result; both travel pickled.

        An InputError of the method is raised here too; OutOfTime if there was no result in time,
        when the process is killed; and else WorkerError.
        """
        self.send(method, *arguments)
        return self.receive(seconds)

    def send(self, method: str, *arguments: object) -> None:
        """Begin a call, of which `receive` returns the result."""
        self._is_busy = True
        with contextlib.suppress(BrokenPipeError):  # receive tells why
            self._connection.send((method, arguments))

    def receive(self, seconds: float) -> Any:
        """Wait for the result of a call; raises what `ask` raises."""
        if not self._connection.poll(seconds):
            self.end()
            raise OutOfTime(f"no result within {seconds:.0f} s")
        try:
            error, result = self._connection.recv()
        except (EOFError, ConnectionResetError):
            wait([self._process.sentinel], GRACE_SECONDS)
            said = _tail(self._output)
            self.end()
            how = _describe(self._process.exitcode)
            raise WorkerError(f"its process ended with {how}: {said}") from None
        self._is_busy = False
        if error is not None:
            raise error(result)
        return result

    def end(self) -> None:
        """End the process and what it has started; in the middle of a call it is killed."""
        if self._connection.closed:
            return
        self._connection.close()  # a process that waits for a call ends by itself
        if not self._is_busy:
            wait([self._process.sentinel], GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            # This comes before the join, after which its number may be another process's.
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # it may not have a group of its own yet
        self._process.join()
        self._folder.cleanup()


def call(function: Callable[..., Any], *arguments: object, seconds: float) -> Any:
    """Call a function in a fresh process; raises what `Worker.ask` raises."""
    with Worker(partial, function, *arguments) as worker:
        return worker.ask("__call__", seconds=seconds)


def _serve(
    connection: Connection,
    output: str,
    parent: int,
    make: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which then ends this process
    die_with_parent(parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    made: list[object] = []
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            if not made:
                made.append(make(*arguments))
            reply = None, getattr(made[0], method)(*given)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            is_input = isinstance(error, InputError)
            reply = (InputError, str(error)) if is_input else (WorkerError, text)
        connection.send(reply)


def _describe(code: int | None) -> str:
    """Describe an exit code, which is -n for a process that signal n has ended."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _tail(path: Path) -> str:
    """Return the last line of what a process has written to a file, shortened from the left."""
    try:
        return last_line(path.read_text(encoding="utf-8", errors="replace"))[-_LONGEST_TAIL:]
    except OSError:
        return last_line("")


def last_line(text: str) -> str:
    """Return the last line of what a process has said, which is mostly why it ended."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
