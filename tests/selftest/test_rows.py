"""The guard around one row, and the budget."""

from vigpipe.selftest.rows import Budget, Row, attempt
from vigpipe.selftest.worker import OutOfTime


class Clock:
    """Tells the time that the test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_part_gets_its_share_of_what_is_left():
    clock = Clock()
    budget = Budget(60, clock)
    clock.now += 20
    half = budget.part(0.5)
    assert (budget.left, half.seconds, half.left) == (40, 20, 20)
    clock.now += 30
    assert (budget.left, half.left) == (10, 0)


def passing(seconds):
    return [Row("one", "passed", {"limit": seconds}), Row("two", "measured")]


def test_work_may_take_what_is_left_but_not_hang():
    assert attempt("what", Budget(100, Clock()), 5, 30, passing) == passing(30)
    assert attempt("what", Budget(20, Clock()), 5, 30, passing) == passing(20)


def test_work_that_does_not_fit_is_not_begun():
    (row,) = attempt("what", Budget(4, Clock()), 5, 30, passing)
    assert (row.outcome, row.values) == ("skipped", {})
    assert "4 s were left, and it may take 5 s" in row.note


def out_of_time(seconds):
    raise OutOfTime(f"{seconds} s")


def test_a_hang_fails_and_a_budget_that_ends_skips():
    (hung,) = attempt("what", Budget(100, Clock()), 5, 30, out_of_time)
    assert (hung.outcome, hung.note) == ("failed", "did not end within 30 s")
    (cut_off,) = attempt("what", Budget(20, Clock()), 5, 30, out_of_time)
    assert cut_off.outcome == "skipped"
    assert "cut off after 20 s" in cut_off.note


def raising(seconds):
    raise ValueError("two\nlines")


def test_an_error_is_a_row_on_one_line():
    (row,) = attempt("what", Budget(100, Clock()), 5, 30, raising)
    assert (row.what, row.outcome, row.note) == ("what", "failed", r"ValueError: two\nlines")
