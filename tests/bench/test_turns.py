"""Ratios of ways to run a model, and when they are none."""

from typing import Any

import pytest

from vigpipe.bench.turns import Entry, best_reference, ratio, take_turns
from vigpipe.bench.way import Way
from vigpipe.bench.worker import WorkerError

pytestmark = pytest.mark.heavy

EAGER = Way("reference", False, "float32")
COMPILED = Way("reference", True, "float32", channels_last=True)
OURS = Way("ours", False, "float32")


def test_the_best_reference_has_the_least_median_and_is_never_ours():
    seconds = {EAGER: [2.0, 2.0, 0.5], COMPILED: [1.0, 1.1, 9.0], OURS: [0.1, 0.1, 0.1]}
    assert best_reference(seconds) == COMPILED
    assert best_reference({OURS: [0.1]}) is None


class Steady:
    """A worker whose every turn takes as long; it may fail at one of them."""

    def __init__(self, seconds, fails_at=None):
        self.seconds, self.fails_at = seconds, fails_at
        self.num_turns, self.is_alive = 0, True

    def ask(self, what, seconds):
        assert what == "turn"
        assert self.is_alive
        self.num_turns += 1
        if self.num_turns == self.fails_at:
            raise WorkerError("out of memory")
        return self.seconds

    def end(self):
        self.is_alive = False


def entry(way, worker: Any):
    return Entry(way, "training", worker)


def test_the_slowest_of_the_reference_leave_so_that_the_others_are_compared_in_less_time():
    workers = [Steady(2.0), Steady(1.0), Steady(3.0), Steady(1.5, fails_at=1), Steady(4.0)]
    layouts = [(compiled, last) for compiled in (False, True) for last in (False, True)]
    ways = [Way("reference", c, "float32", channels_last=last) for c, last in layouts]
    entries = [entry(way, w) for way, w in zip([*ways, OURS], workers, strict=True)]
    take_turns(entries, 5, qualifying=2)
    assert [len(e.seconds) for e in entries] == [5, 5, 2, 0, 5]  # ours goes on, though slowest
    assert not any(w.is_alive for w in workers)
    assert [e.outcome for e in entries] == [*["measured"] * 3, "failed", "measured"]
    seconds = {e.way: e.seconds for e in entries if e.outcome == "measured"}
    assert best_reference(seconds) == ways[1]
    assert ratio(seconds, ways[1], ways[2]).median == pytest.approx(1 / 3)


def test_without_a_qualification_all_go_on():
    entries = [entry(EAGER, Steady(t)) for t in (1.0, 2.0, 3.0)]
    take_turns(entries, 4)
    assert [len(e.seconds) for e in entries] == [4, 4, 4]


def test_a_ratio_is_taken_turn_by_turn():
    found = ratio({EAGER: [2.0, 4.0, 6.0], OURS: [1.0, 2.0, 2.0]}, EAGER, OURS)
    assert (found.median, found.least, found.most) == (2.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        ([1.0, 1.0, 1.1, 0.9, 1.0], "2.00× (1.82 – 2.22)"),
        ([1.0, 2.0, 1.0, 0.5, 2.0], "not measurable here (1.00 – 4.00)"),
    ],
)
def test_turns_that_disagree_are_no_measurement(ours, text):
    assert str(ratio({EAGER: [2.0] * 5, OURS: ours}, EAGER, OURS)) == text


def test_a_way_names_all_its_options():
    assert str(COMPILED) == "reference, compiled, channels last, float32"
    frozen = Way("ours", True, "bfloat16", frozen=True, autotuned=True)
    assert str(frozen) == "ours, compiled, max-autotune, frozen, bfloat16"
