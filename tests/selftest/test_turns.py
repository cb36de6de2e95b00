"""Ways to run a model that take turns: what is run, and when turns are a measurement."""

import pytest
import torch

from vigpipe.selftest.turns import ratio
from vigpipe.selftest.way import Way, make_step

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


def test_turns_that_disagree_are_no_measurement():
    one, other = Way("reference", False, "float32"), Way("ours", False, "float32")
    found = ratio({one: [2.0] * 5, other: [1.0, 2.0, 1.0, 0.5, 2.0]}, one, other)
    assert str(found) == "not measurable here (1.00 – 4.00)"
