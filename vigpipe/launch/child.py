"""Run a command in a process of its own, and leave nothing of it behind."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from vigpipe.launch.signals import deferred

_GRACE_SECONDS = 20.0  # for a child to end its ranks


class Stopped(BaseException):
    """A signal asked this process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise Stopped meanwhile, as Ctrl-C raises KeyboardInterrupt."""
    # Under nohup SIGHUP is ignored, and stays so.
    wanted = (signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(signum)


def run_child(command: Sequence[str]) -> int:
    """Run a command to its end.

    It has a process group of its own, so that Ctrl-C reaches it through here, and what it leaves
    behind can be ended. What it prints to stdout is dropped; stderr is that of this process.

    Args:
        command: words, for no shell.

    Returns:
        Its exit code, 128 + n if signal n ended it.
    """
    child = None
    nothing = subprocess.DEVNULL
    try:
        with deferred():  # or a signal could come when the child runs but has no name here
            child = subprocess.Popen(command, stdin=nothing, stdout=nothing, process_group=0)
        code = child.wait()
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
            child.wait()
    return 128 - code if code < 0 else code
