"""How boxes are told apart, and what stands in them."""

from itertools import pairwise

from vigpipe.spans import Span
from vigpipe.timing.boxes import COLOURS, HATCHES, explanation, label, places_of_stages

# Four stages on two ranks, and the same again as a second replica.
LOOPED = [
    Span(rank + 2 * replica, "forward", 0.0, 1.0, rank + 2 * place, 7)
    for replica in range(2)
    for rank in range(2)
    for place in range(2)
]


def test_greys_differ_by_a_seventh_of_the_way_from_black_to_white_and_waiting_by_its_hatch_too():
    greys = [int(c[1:3], 16) for c in COLOURS.values() if c[1:3] == c[3:5] == c[5:7]]
    assert len(greys) == 4
    assert min(a - b for a, b in pairwise(sorted(greys, reverse=True))) >= 36
    waiting = [HATCHES[kind] for kind in COLOURS if kind.startswith("wait")]
    assert len(set(waiting)) == len(waiting) == 3


def test_text_and_its_explanation_name_the_stage_only_where_ranks_hold_several():
    looped, simple = places_of_stages(LOOPED), places_of_stages(LOOPED[:1])
    assert label(LOOPED[1], looped) == ["7", "s2"]
    assert label(LOOPED[0], simple) == ["7"]
    assert label(Span(0, "wait input", 0, 1, 0, 7), looped) == []
    assert label(Span(0, "forward", 0, 1, 0), looped) == []
    assert "stage" in explanation(looped)
    assert "stage" not in explanation(simple)
