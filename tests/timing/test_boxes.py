"""How boxes are told apart, and what stands in them."""

from itertools import pairwise
from typing import get_args

from vigpipe.spans import Kind, Span
from vigpipe.timing.boxes import COLOURS, HATCHES, by_look, explanation, label, places_of_stages

# Four stages on two ranks, and the same again as a second replica.
LOOPED = [
    Span(rank + 2 * replica, "forward", 0.0, 1.0, rank + 2 * place, 7)
    for replica in range(2)
    for rank in range(2)
    for place in range(2)
]


def test_every_kind_has_a_colour_of_its_own():
    assert list(COLOURS) == list(get_args(Kind))
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_greys_differ_by_a_seventh_of_the_way_from_black_to_white_and_waiting_by_its_hatch_too():
    greys = [int(c[1:3], 16) for c in COLOURS.values() if c[1:3] == c[3:5] == c[5:7]]
    assert len(greys) == 4
    assert min(a - b for a, b in pairwise(sorted(greys, reverse=True))) >= 36
    waiting = [HATCHES[kind] for kind in COLOURS if kind.startswith("wait")]
    assert len(set(waiting)) == len(waiting) == 3


def test_stages_have_a_place_on_their_rank_in_every_replica():
    assert places_of_stages(LOOPED) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert places_of_stages([Span(1, "wait input", 0, 1, 3, 0), Span(0, "send", 0, 1)]) == {}


def test_a_rank_s_later_stages_are_paler_and_named():
    places = places_of_stages(LOOPED)
    first, later = by_look(LOOPED, places).items()
    assert [look.name for look, _ in (first, later)] == [
        "forward, stages 0–1",
        "forward, stages 2–3",
    ]
    assert {span.stage for span in first[1]} == {0, 1}
    assert first[0].colour == COLOURS["forward"]
    dark, pale = (int(look.colour[1:], 16).to_bytes(3) for look, _ in (first, later))
    assert all(a > b for a, b in zip(pale, dark, strict=True))


def test_one_stage_a_rank_looks_as_its_kind_does():
    spans = [Span(1, "optimizer", 2, 3), Span(1, "forward", 0, 1, 1, 4), Span(0, "send", 0, 1)]
    looks = list(by_look(spans, places_of_stages(spans)))
    assert [look.name for look in looks] == ["forward", "send", "optimizer"]  # in their order
    assert [look.colour for look in looks] == [COLOURS[look.kind] for look in looks]


def test_text_and_its_explanation_name_the_stage_only_where_ranks_hold_several():
    looped, simple = places_of_stages(LOOPED), places_of_stages(LOOPED[:1])
    assert label(LOOPED[1], looped) == ["7", "s2"]
    assert label(LOOPED[0], simple) == ["7"]
    assert label(Span(0, "wait input", 0, 1, 0, 7), looped) == []
    assert label(Span(0, "forward", 0, 1, 0), looped) == []
    assert "stage" in explanation(looped)
    assert "stage" not in explanation(simple)
