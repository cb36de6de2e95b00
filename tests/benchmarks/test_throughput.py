"""Training and inference against the best of the reference's ways."""

import pytest
import torch

from benchmarks import throughput
from vigpipe.selftest.turns import Entry, ratio
from vigpipe.selftest.way import Prepared, Way, make_step

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")


def test_products_are_those_of_a_step_and_nothing_else():
    step = make_step("vig_digits", Way("products", False, "float32"), "training", 2, CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    wanted = {"aten::addmm", "aten::convolution", "vigpipe::grouped", "vigpipe::grouped_backward"}
    assert wanted <= names
    assert not any("norm" in name or "knn" in name for name in names)


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


def ours(compiled=False):
    return Entry(Way("ours", compiled, "float32"), "training")


def test_turns_that_disagree_are_no_measurement():
    one, other = Way("reference", False, "float32"), Way("ours", False, "float32")
    found = ratio({one: [2.0] * 5, other: [1.0, 2.0, 1.0, 0.5, 2.0]}, one, other)
    assert str(found) == "not measurable here (1.00 – 4.00)"
