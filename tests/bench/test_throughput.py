"""Training and inference against the best of the reference's ways."""

import pytest
import torch

from vigpipe.bench import throughput
from vigpipe.bench.turns import Entry
from vigpipe.bench.way import Prepared, Way, make_step

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")


def test_the_reference_runs_in_every_way_that_its_users_have():
    training = throughput.ways("training", "float32", compiled=True)
    inference = throughput.ways("inference", "float32", compiled=True)
    references = [way for way in inference if way.formulation == "reference"]
    assert {(way.compiled, way.frozen, way.channels_last) for way in references} == {
        (compiled, frozen, last)
        for compiled in (False, True)
        for frozen in (False, compiled)
        for last in (False, True)
    }
    assert any(way.autotuned for way in references)
    assert not any(way.frozen for way in training)  # weights change
    assert not any(way.compiled for way in throughput.ways("training", "float32", compiled=False))


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_products_are_those_of_a_step_and_nothing_else(mode):
    way = Way("products", False, "float32")
    step = make_step("vig_digits", way, mode, 2, CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    assert {"aten::addmm", "aten::convolution", "vigpipe::grouped"} <= names
    assert not any("norm" in name or "knn" in name for name in names)
    assert ("vigpipe::grouped_backward" in names) == (mode == "training")


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
