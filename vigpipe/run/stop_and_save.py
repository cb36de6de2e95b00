"""Decide when a run saves, stops early (time limits, signals), and say how it goes on."""

import contextlib
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType

from vigpipe.config.interval import Interval, parse_duration
from vigpipe.errors import INTERRUPTED, SAVED, InputError
from vigpipe.launch.second_signal import SecondSignal

# What asks a run to save and stop, and its exit code then. Slurm sends that of --signal=USR1@60.
ASKS_TO_STOP = {signal.SIGTERM: SAVED, signal.SIGUSR1: SAVED, signal.SIGINT: INTERRUPTED}
ANSWER = "Ctrl-C: the run saves and stops after this step; another one ends it at once"
# A file that `vigpipe.train` names to its run, and in which it says why it asks it to stop.
ASKED_VARIABLE = "VIGPIPE_ASKED"


def parse_stop_before(text: str | None, env: Mapping[str, str]) -> float:
    """Parse --stop-before: when to save and stop, on `time.monotonic`; infinity for None.

    Newer versions of Slurm set SLURM_JOB_END_TIME, and slurm/train.sbatch sets it for older ones. A
    moment that has passed is an InputError: every restart would do one step and stop again.
    """
    if text is None:
        return math.inf
    before = parse_duration(text)
    if before:
        end = env.get("SLURM_JOB_END_TIME", "")
        if not re.fullmatch(r"[0-9]{1,12}", end):
            raise InputError(
                f"--stop-before {text}: is a time before the job's limit, but SLURM_JOB_END_TIME "
                "is not set, so there is none to be seen; give a moment such as 2026-11-22T06:00"
            )
        moment = int(end) - before
    else:
        try:
            moment = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            raise InputError(
                f"--stop-before {text}: must be a time before the job's limit such as 5m, or a "
                "moment such as 2026-11-22T06:00"
            ) from None
    left = moment - time.time()
    if left <= 0 and not before:
        raise InputError(f"--stop-before {text}: that was {-left:.0f} s ago; give a later moment")
    return time.monotonic() + left


def how_to_go_on(folder: Path) -> str:
    """Say how a run that has saved goes on, in the words of the shell or of Python."""
    if ASKED_VARIABLE in os.environ:
        return f"go on with vigpipe.train(out={str(folder)!r}, resume='auto', ...)"
    return f"go on with --out {shlex.quote(str(folder))} --resume auto"


def what_is_saved(folder: Path, newest: str | None) -> str:
    """Say how a run goes on that has ended without saving again."""
    if newest is None:
        return "with nothing saved"
    return f"and the newest checkpoint is {newest}; {how_to_go_on(folder)}"


class SaveAndStop:
    """Decides when this rank wants to save and to stop; all ranks then agree.

    Of a launcher's ranks, which end with the run, the signals stay handled to the end.
    """

    why = ""  # why this rank was asked to stop; empty if it was not
    code = SAVED  # the exit code that fits it
    has_stepped = False  # whether this rank has done its part of a step: there is something to save

    def __init__(
        self,
        interval: Interval,
        stop_at: float = math.inf,
        rank: int = 0,
        has_peers: bool = False,
        timeout_seconds: float = math.inf,
    ) -> None:
        self.interval, self.stop_at = interval, stop_at  # between checkpoints; a monotonic time
        self._last_asked: int | None = None
        self.has_peers = has_peers  # a launcher has started other ranks too
        # Ends this rank if it was asked to stop and no step ends in time, or if asked again.
        self._second_signal = SecondSignal(
            [signal.SIGTERM, signal.SIGINT], timeout_seconds, "" if rank > 0 else ANSWER
        )
        self.saved()

    def __enter__(self) -> None:
        """Treat the signals in ASKS_TO_STOP as requests to save and stop after the current step."""
        self._second_signal.__enter__()
        # In a shell's background job Ctrl-C is ignored.
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        numbers = ASKS_TO_STOP.keys() - ({signal.SIGINT} if is_ignored else set())
        self._handlers = {number: signal.signal(number, self._asked) for number in numbers}

    def __exit__(self, *_: object) -> None:
        # A launcher sends SIGTERM as soon as one rank has ended. It must not end this one before
        # `launch.failures.run_rank` has said why: the handlers stay until the process is gone.
        if self.has_peers:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._second_signal.__exit__()

    def end_with(self, last_words: Callable[[], str]) -> None:
        """Say what these words are when a second Ctrl-C ends this process."""
        self._second_signal.last_words = last_words

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Give this rank all the time it takes in this context, in which no step ends."""
        self._second_signal.is_patient = True
        try:
            yield
        finally:
            self._second_signal.is_patient = False
            self._second_signal.went_on()

    def saved(self) -> None:
        """Note that a checkpoint has just been taken: the interval starts again."""
        self._last_save = time.monotonic()

    def is_save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after a step, counted from 1, or one since asked last."""
        since = time.monotonic() - self._last_save
        last, self._last_asked = self._last_asked, step
        first = step if last is None or step < last else last + 1
        return any(self.interval.is_over(s, since) for s in range(first, step + 1))

    def is_stop_due(self) -> bool:
        self._second_signal.went_on()
        self.has_stepped = True
        if not self.why and time.monotonic() >= self.stop_at:
            self.why = "the time limit is near"
        return bool(self.why)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.why:
            return  # the first one says why
        self.code = ASKS_TO_STOP[signal.Signals(number)]
        self.why = f"process {os.getpid()} got {signal.Signals(number).name}"
        if number == signal.SIGINT:
            self.why = "Ctrl-C"
        elif ASKED_VARIABLE in os.environ:
            with contextlib.suppress(OSError):  # somebody else has sent it
                self.why = Path(os.environ[ASKED_VARIABLE]).read_text(encoding="utf-8")
