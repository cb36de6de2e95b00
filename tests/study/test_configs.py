"""Names of layouts, their baselines and ceilings, and the published figures."""

import pytest

from tests.commands.refusals import check_calls
from vigpipe.parallel.layout import Layout
from vigpipe.study.configs import (
    STEP_SECONDS,
    baseline,
    ceiling,
    name_of,
    parse_configs,
    published_speedup,
)
from vigpipe.study.options import StudyConfig


def test_the_default_is_the_studys_experiment_and_its_second_baselines():
    layouts = parse_configs(StudyConfig().configs)
    assert set(STEP_SECONDS) <= set(layouts)
    assert {name_of(baseline(layout)) for layout in layouts.values()} <= set(layouts)


def test_a_name_is_copies_by_stages_by_microbatches():
    assert parse_configs("sequential, accumulated-20,2x5 ,2x3x5,2x1x4,3x1") == {
        "sequential": Layout(),
        "accumulated-20": Layout(num_microbatches=20),
        "2x5": Layout(2, 5),
        "2x3x5": Layout(3, 5, 2),
        "2x1x4": Layout(1, 4, 2),
        "3x1": Layout(3, 1),
    }


def test_another_name_or_one_twice_is_refused():
    names = ["", "sequentially", "accumulated-1", "accumulated-", "1x5", "1x2x5", "02x5", "0x5"]
    names += ["2x0", "2x5x", "-2x5", "2x2x2x2", "2x1000000000", "²x5"]
    rows = [(f"sequential,{name}", "is not a layout") for name in names]
    check_calls(parse_configs, [*rows, ("2x5,sequential, 2x5", "2x5 is there twice")])


def test_the_baseline_has_the_microbatches_of_all_copies_on_one_stage():
    assert baseline(Layout(2, 5, 2)) == Layout(1, 10, 1)
    assert name_of(baseline(Layout(2, 5, 2))) == "accumulated-10"
    assert name_of(baseline(Layout(2, 1))) == "sequential"


def test_the_ceiling_is_that_of_equal_stages():
    assert ceiling(Layout(2, 5)) == pytest.approx(1.667, abs=1e-3)
    assert ceiling(Layout(4, 10)) == pytest.approx(3.077, abs=1e-3)
    assert ceiling(Layout(2, 5, 2)) == pytest.approx(2 * 1.667, abs=2e-3)
    assert ceiling(Layout(1, 7)) == 1


def test_published_speedups_are_against_the_whole_mini_batch():
    assert published_speedup("2x5") == pytest.approx(1.968, abs=1e-3)
    assert published_speedup("2x10") == pytest.approx(1.457, abs=1e-3)
    assert published_speedup("accumulated-5") is None
    assert published_speedup("sequential") is None
