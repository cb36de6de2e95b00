"""Intervals in steps and in time."""

import pytest

from vigpipe.config.interval import Interval, parse_duration, parse_interval
from vigpipe.errors import InputError


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("50", Interval(steps=50)),
        (7, Interval(steps=7)),
        ("10m", Interval(seconds=600)),
        ("1.5h", Interval(seconds=5400)),
        ("90s", Interval(seconds=90)),
        ("1d", Interval(seconds=86400)),
        ("never", Interval()),
    ],
)
def test_intervals(text, interval):
    assert parse_interval("--log-every", text) == interval


@pytest.mark.parametrize(
    "text", ["0", "-5", "5 m", "m", "", "nan", "1e9", "0s", "inf", "10000000000"]
)
def test_no_intervals(text):
    with pytest.raises(InputError, match=f"--log-every {text}: must be a number of steps such as"):
        parse_interval("--log-every", text)


def test_an_interval_in_steps_is_counted_from_the_start_of_the_run():
    every_four = Interval(steps=4)
    assert [step for step in range(1, 11) if every_four.is_over(step, 1e9)] == [4, 8]


def test_an_interval_in_seconds_is_over_when_they_have_passed():
    assert [Interval(seconds=20).is_over(1, seconds) for seconds in (0, 19.9, 20)] == [0, 0, 1]


def test_never_is_never():
    assert not any(Interval().is_over(step, 1e9) for step in range(1, 11))


def test_durations():
    assert parse_duration("2h") == 7200
    assert parse_duration("2") == 0
