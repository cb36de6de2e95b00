"""End this process when it is asked a second time to stop, also while it is stuck.

Python runs a signal's handler in the main thread, between two bytecodes: never while that thread
waits in C code, and in vain while it goes round in a loop. The number of the signal is written to a
pipe all the same (signal.set_wakeup_fd), and a thread reads it there.
"""

import contextlib
import math
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn, Self

from vigpipe.messages import line

# A launcher hands on a signal that the ranks may have got by themselves, as all processes of a
# group, or all that a terminal interrupts: within this time it is the same one.
SAME_SECONDS = 2.0


class SignalThread(threading.Thread):
    """Waits for signals, and holds nothing meanwhile."""


class SecondSignal:
    """Ends this process with 128 + n when signal n comes again; use it as a context.

    Only the innermost context counts, in the main thread, where Python handles signals. The signals
    that count need handlers, which are called as always. The process also ends if one SIGTERM has
    come and `went_on` is not called for `patience_seconds`, but not while `is_patient` is set.

    To the first Ctrl-C it answers `answer`, also while the process is busy. When a second one ends
    it, it says so, with the `last_words`, unless there are none.
    """

    def __init__(
        self,
        numbers: Collection[signal.Signals],
        patience_seconds: float = math.inf,
        answer: str = "",
    ) -> None:
        self._numbers, self._patience_seconds = numbers, patience_seconds
        self._answer = answer
        self.last_words: Callable[[], str] = str
        self._pipe: int | None = None
        self.is_patient = False
        self.went_on()

    def went_on(self) -> None:
        """Note that the process is not stuck."""
        self._went_on_at = time.monotonic()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            reader, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            self.thread = SignalThread(target=self._watch, args=(reader,), daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
            os.close(self._pipe)  # the thread reads to the end, and ends

    def _watch(self, reader: int) -> None:
        first: dict[int, float] = {}  # when a signal came first
        while True:
            left = None
            if signal.SIGTERM in first and self._patience_seconds < math.inf:
                since = max(first[signal.SIGTERM], self._went_on_at)
                left = since + self._patience_seconds - time.monotonic()
                if self.is_patient:
                    left = self._patience_seconds
                elif left <= 0:
                    why = f"got SIGTERM, and no step has ended for {self._patience_seconds:g} s"
                    return _end(signal.SIGTERM, f"process {os.getpid()} {why}: it was ended")
            if not select.select([reader], [], [], left)[0]:
                continue
            numbers = os.read(reader, 1)
            if not numbers:
                os.close(reader)
                return
            number, now = signal.Signals(numbers[0]), time.monotonic()
            is_second = number in first and now - first[number] > SAME_SECONDS
            if is_second and number in self._numbers:
                return _end(number, self.last_words() if number == signal.SIGINT else "")
            if number == signal.SIGINT and number not in first:
                _write(self._answer)
            first.setdefault(number, now)


def _end(number: signal.Signals, sentence: str) -> NoReturn:
    """End with all data loaders; nothing is flushed, for that may be where the process is stuck."""
    for child in multiprocessing.active_children():
        child.kill()
    _write(sentence)
    os._exit(128 + number)


def _write(sentence: str) -> None:
    """Write a sentence to stderr, if there is one, and if that waits for nobody."""
    if sentence and select.select([], [2], [], 0)[1]:
        os.write(2, line(sentence).encode())


@contextlib.contextmanager
def left_to_handlers() -> Iterator[None]:
    """Let this process's own handlers decide in this context: it has others to end first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
