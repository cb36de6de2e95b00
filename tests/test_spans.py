"""Sums over stretches of time."""

from vigpipe.spans import COMPUTE, KINDS, WAITING, Span, by_rank, step_seconds

SPANS = [
    Span(1, "forward", 3.0, 4.5, 1, 0),
    Span(0, "wait gradient", 2.0, 5.0),
    Span(0, "forward", 1.0, 2.0, 0, 0),
    Span(1, "wait input", 0.5, 3.0),
]


def test_every_kind_is_known_once():
    assert len(set(KINDS)) == len(KINDS) == 9
    assert {*WAITING, *COMPUTE} < set(KINDS)


def test_a_span_lasts_from_start_to_end():
    assert SPANS[0].seconds == 1.5


def test_the_spans_of_every_rank_come_in_the_order_of_time():
    assert by_rank(SPANS) == {0: [SPANS[2], SPANS[1]], 1: [SPANS[3], SPANS[0]]}
    assert list(by_rank(SPANS)) == [0, 1]
    assert by_rank([]) == {}


def test_a_step_lasts_from_the_first_start_to_the_last_end():
    assert step_seconds(SPANS) == 4.5
    assert step_seconds([]) == 0
