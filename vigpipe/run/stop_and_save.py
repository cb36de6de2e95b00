"""When a run saves, and when it stops before its end: intervals, time limits, signals."""

import math
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import FrameType

from vigpipe.errors import InputError

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the one it was told: --signal=USR1@60
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Every:
    """An interval between checkpoints: a number of steps, or of seconds; never if both are 0."""

    steps: int = 0
    seconds: float = 0.0


def parse_every(text: str | int) -> Every:
    """50, 10m, 1.5h or never.

    Raises:
        InputError: it is none of these.
    """
    text = str(text).strip()
    if text == "never":
        return Every()
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return Every(steps=int(text))
    if seconds := parse_duration(text):
        return Every(seconds=seconds)
    raise InputError(
        f"--checkpoint-every {text}: must be a number of steps such as 50, a time such as 10m "
        "(s, m, h, d), or never"
    )


def parse_duration(text: str) -> float:
    """Seconds of 90s, 10m, 1.5h, 1d; 0 if it is no such thing."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([smhd])", text)
    return float(match[1]) * _SECONDS[match[2]] if match else 0.0


def parse_stop_before(text: str | None, env: Mapping[str, str]) -> float:
    """When to save and stop, on `time.monotonic`, which no change of the clock moves.

    Args:
        text: 5m before the job's time limit, as Slurm tells it, or a moment: 2026-11-22T06:00.
        env: environment variables; newer Slurms set SLURM_JOB_END_TIME, and slurm/train.sbatch does
            for the others.

    Returns:
        Infinity for None.

    Raises:
        InputError: it is neither, there is no such limit, or the moment has passed: every start
            from now on would do one step and ask for the next.
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


class SaveAndStop:
    """One rank's own view of when to save and to stop; the ranks then agree.

    Args:
        every: interval between checkpoints.
        num_steps: of the run; where steps count, its last one is saved too.
        stop_at: on `time.monotonic`.
    """

    def __init__(self, every: Every, num_steps: int, stop_at: float = math.inf) -> None:
        self.every, self.num_steps, self.stop_at = every, num_steps, stop_at
        self.why = ""  # this rank was asked to stop
        self.saved()

    def __enter__(self) -> None:
        """Take SIGTERM and SIGUSR1 as a wish to save and stop after the step that is going on."""
        self._handlers = {number: signal.signal(number, self._asked) for number in ASKS_TO_STOP}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def saved(self) -> None:
        """A checkpoint has been taken."""
        self._last = time.monotonic()

    def is_save_due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self.every.steps:
            return step % self.every.steps == 0 or step == self.num_steps
        return 0 < self.every.seconds <= time.monotonic() - self._last

    def is_stop_due(self) -> bool:
        """Whether to save and stop after the step that is going on."""
        if not self.why and time.monotonic() >= self.stop_at:
            self.why = "the time limit is near"
        return bool(self.why)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.why = f"process {os.getpid()} got {signal.Signals(number).name}"
