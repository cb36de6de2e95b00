"""Handle the signals that ask this process to stop: raise at once, or defer them."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_ignored(number: signal.Signals, handler: Handler) -> None:
    """Handle a signal from now on, unless this process was started with it ignored."""
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, handler)


def interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt; another Ctrl-C must not do so amid what is done about it."""
    signal.signal(number, lambda *_: None)
    raise KeyboardInterrupt


class Stopped(BaseException):
    """A signal asked this process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def handled_signals(
    numbers: Sequence[signal.Signals],
    handler: Handler,
) -> Iterator[None]:
    """Handle signals in this context, except ignored ones; Python does so in the main thread only.

    Under nohup, or in a shell's background job, some signals are ignored and must stay ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back the signals in STOPPING until this context ends; nothing is left half done."""
    caught: list[int] = []
    with handled_signals(STOPPING, lambda number, _: caught.append(number)):
        yield
    if caught:
        signal.raise_signal(caught[0])
