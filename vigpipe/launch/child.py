"""Run a command in a separate process, and leave none of its processes behind."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from vigpipe.launch.safe_path import ROOT
from vigpipe.launch.signals import Stopped, deferred_signals, handled_signals

_GRACE_SECONDS = 20.0  # the time a child has to end its ranks


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise Stopped in this context, as Ctrl-C raises KeyboardInterrupt."""
    with handled_signals((signal.SIGTERM, signal.SIGHUP), _stop):
        yield


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(signum)


def vigpipe_command(*words: str) -> list[str]:
    """Return the words of a command that is `vigpipe WORDS`.

    It ends with this process if this one's id is in `fork_server.STARTER` of its environment.
    """
    program = (
        f"import sys; {ROOT!r} in sys.path or sys.path.insert(0, {ROOT!r}); "
        "import vigpipe.launch.parent_death, vigpipe.__main__; vigpipe.__main__.run()"
    )
    return [sys.executable, "-P", "-c", program, *words]


@contextlib.contextmanager
def child_process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; when this context ends, however it ends, none of its processes is left.

    The command gets its own process group: Ctrl-C reaches it only through this process, and the
    processes it leaves behind can be ended. An exception in this context asks it to stop first.
    """
    child = None
    try:
        with deferred_signals():  # a signal must not come between the start and the assignment
            child = subprocess.Popen[bytes](
                command, stdin=subprocess.DEVNULL, process_group=0, **options
            )
        yield child
    except BaseException:
        if child is not None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_SECONDS)
        raise
    finally:
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with child:  # closes its pipes and waits for it
                pass


def shell_code(code: int) -> int:
    """Return the exit code as a shell tells it: 128 + n for a process that signal n ended (-n)."""
    return 128 - code if code < 0 else code
