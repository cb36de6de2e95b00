"""Intervals between checkpoints and between lines of progress: in steps or in time."""

import re
from dataclasses import dataclass

from vigpipe.errors import InputError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Interval:
    """An interval in optimizer steps or in seconds, of which one is 0; never if both are."""

    steps: int = 0
    seconds: float = 0.0

    def is_over(self, step: int, seconds: float) -> bool:
        """Whether it is over at this step, counted from 1, so many seconds after it began."""
        if self.steps:
            return step % self.steps == 0
        return 0 < self.seconds <= seconds


def parse_interval(option: str, text: str | int) -> Interval:
    """Parse 50 (steps), 30s, 10m, 1.5h or never; an InputError names the option."""
    text = str(text).strip()
    if text == "never":
        return Interval()
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0:
        return Interval(steps=int(text))
    if seconds := parse_duration(text):
        return Interval(seconds=seconds)
    raise InputError(
        f"{option} {text}: must be a number of steps such as 50, a time such as 10m (s, m, h, d), "
        "or never"
    )


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 10m, 1.5h or 1d; 0 for any other text."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([smhd])", text)
    return float(match[1]) * _SECONDS[match[2]] if match else 0.0
