"""Training and inference against the best of the reference's ways."""

import pytest

from benchmarks import throughput
from vigpipe.selftest.turns import Entry
from vigpipe.selftest.way import Precision, Prepared, Way

pytestmark = pytest.mark.heavy


def test_a_way_that_does_not_compile_is_a_row_that_says_so():
    entries = [Entry(Way("reference", False, "float32"), "training"), ours(), ours(compiled=True)]
    entries[0].prepared, entries[0].seconds = Prepared(1.0, 1.0, 1e6, []), [2.0, 2.2, 2.0]
    entries[1].prepared, entries[1].seconds = Prepared(1.0, 1.0, 1e6, []), [1.0, 1.0, 1.0]
    entries[2].give_up("failed", "InductorError: CppCompileError")
    reference, eager, compiled = throughput._rows("m", entries, 4, 0.05)
    assert reference["ratio"] == "1 (the best reference)"
    assert (eager["images/s"], eager["ratio"]) == ("4.0", "2.00× (2.00 – 2.20)")
    assert eager["of the matrix rate"] == "20%"
    assert compiled["images/s"] == "InductorError: CppCompileError"


def test_turns_that_disagree_are_no_measurement():
    assert throughput._ratio([2.0, 1.0, 2.0, 4.0, 1.0]) == "not measurable here (1.00 – 4.00)"


def test_only_the_fastest_of_the_reference_go_on():
    precisions: tuple[Precision, ...] = "float32", "tf32", "bfloat16"
    entries = [Entry(Way("reference", False, p), "training") for p in precisions] + [ours()]
    for entry, seconds in zip(entries, (2.0, 3.0, 1.0, 9.0), strict=True):
        entry.seconds = [seconds]
    assert throughput._finalists(entries) == [entries[0], *entries[2:]]


def ours(compiled=False):
    return Entry(Way("ours", compiled, "float32"), "training")
