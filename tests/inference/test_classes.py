"""Classes of data are matched with a model's by their names, also where these are numbers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.refusals import check_refusals
from vigpipe.inference.classes import match_classes
from vigpipe.inference.labelled import _labels_of


def matched(ours, theirs, num=None, **options):
    labels, names, notes = match_classes(ours, theirs, num or len(theirs), "d", "w", **options)
    return labels.tolist(), "".join(names), len(notes)


def test_by_name_and_by_number_where_there_are_none():
    assert matched("ca", "abc") == ([2, 0], "abc", 0)
    numbers = [str(i) for i in range(12)]
    as_text = sorted(numbers)
    assert matched(as_text, numbers)[0] == [int(name) for name in as_text]
    assert matched(numbers, as_text)[0] == [as_text.index(name) for name in numbers]
    assert matched(["11", "3"], numbers)[0] == [11, 3]
    assert matched("012", "abc") == ([0, 1, 2], "abc", 1)
    assert matched("abc", "012") == ([0, 1, 2], "abc", 1)
    assert matched("abc", "", 3) == ([0, 1, 2], "abc", 1)
    assert matched("01", "", 3, may_be_fewer=True) == ([0, 1], "012", 0)
    assert matched("01", "abc", may_be_fewer=True) == ([0, 1], "abc", 1)


def test_other_classes_are_refused():
    words = "one of the two does not name them, so give data of as many"
    rows = [
        ("ad", "abc", r"d: has 1 class \(d\), which the model in w does not know"),
        ("01", "abc", f"d: has 2 classes, and the model in w 3; {words}"),
        ("ab", "012", words),
    ]
    check_refusals(rows, partial(matched))


def test_a_thousand_classes_without_names_are_those_of_imagenets_folders():
    names = tuple(map(str, range(1000)))
    facts: dict[str, Any] = {"class_names": (), "num_classes": 1000, "names": lambda: names}
    rest: Any = SimpleNamespace(**facts), SimpleNamespace(data="d", weights="w")
    found = _labels_of(["n01443537", "n01440764"], *rest)
    assert (found.labels.tolist(), found.names, found.notes) == ([1, 0], names, ())
    other = [f"word {number}" for number in range(1000)]  # as many, but which is which?
    words = "1,000 classes .*, which the model in w does not know: its classes are n01440764"
    check_refusals([(other, words)], lambda ours: _labels_of(ours, *rest))
