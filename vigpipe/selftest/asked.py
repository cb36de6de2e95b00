"""What the options of `vigpipe selftest` ask for; does not import torch."""

from vigpipe.config.choices import parse_names
from vigpipe.config.interval import parse_duration
from vigpipe.config.verbs import SelftestConfig
from vigpipe.errors import InputError

LEAST_SECONDS, MOST_SECONDS = 1.0, 24 * 3600.0


def part_names(text: str) -> list[str]:
    """Return the names of --parts; raises InputError for one that its default, all parts, lacks."""
    return parse_names(text, SelftestConfig.parts.split(","), "--parts")


def budget_seconds(text: str) -> float:
    """Return the seconds of --budget; raises InputError for what is no such time."""
    seconds = parse_duration(text)
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise InputError(f"--budget {text}: must be a time from 1s to 1d, such as 10m (s, m, h, d)")
    return seconds
