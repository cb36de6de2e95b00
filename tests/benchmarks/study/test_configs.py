"""Names of layouts, their baselines and ceilings, and the published figures."""

from benchmarks.study.configs import parse_configs
from tests.refusals import check_refusals
from vigpipe.parallel.layout import Layout


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
    names = "", "accumulated-1", "1x5", "1x2x5", "02x5", "2x0", "2x2x2x2", "2x1000000000", "²x5"
    rows = [(f"sequential,{name}", "is not a layout") for name in names]
    check_refusals([*rows, ("2x5,sequential, 2x5", "2x5 is there twice")], parse_configs)
