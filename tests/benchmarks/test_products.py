"""The products of a step alone."""

import pytest
import torch

from benchmarks.products import products_of
from vigpipe.selftest.way import Way, make_step

pytestmark = pytest.mark.heavy

CPU = torch.device("cpu")


def test_products_are_those_of_a_step_and_nothing_else():
    way = Way("products", False, "float32")
    step = products_of(make_step("vig_digits", way, "training", 2, CPU))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    wanted = {"aten::addmm", "aten::convolution", "vigpipe::grouped", "vigpipe::grouped_backward"}
    assert wanted <= names
    assert not any("norm" in name or "knn" in name for name in names)
