"""What ranks do that take every step together, one thing after the other."""

from vigpipe.parallel.agreement import Agreement, Peers, Status
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Loop
from vigpipe.replication.synchronous import Synchronous

COURSE = Course(num_steps=8, steps_per_epoch=3, evaluate_every=1, num_replicas=2)


class Told(Loop):
    """A loop that writes down what it is asked for.

    Args:
        best: epochs whose evaluation is the best so far.
    """

    def __init__(self, best):
        self.best, self.told = best, []

    def evaluate(self, epoch):
        self.told.append(f"e{epoch}")
        return epoch in self.best

    def rest(self, step, *, stop):
        self.told.append("x" if stop else "r")


def told(first_step=0, is_evaluated=True, *, saves=(), stops=(), best=()):
    """What replica 1 does: s3 is a step with item 3, e2 an evaluation, r a rest, x the last one.

    Args:
        first_step: steps done before.
        is_evaluated: whether they were evaluated.
        saves: items after which a rank wants to save.
        stops: items after which a rank wants to stop.
        best: epochs whose evaluation is the best so far.
    """
    strategy, loop = Synchronous(COURSE, 1, Peers(4)), Told(best)
    for number, *_ in strategy.items(first_step, is_evaluated, loop):
        loop.told.append(f"s{number}")
        others = Status(save=number in saves, stop=number in stops)
        strategy.hear(Agreement([Status(), others]))
    return " ".join(loop.told)


def test_every_epoch_and_the_last_step_end_with_an_evaluation():
    assert told() == "s1 s3 s5 e1 s7 s9 s11 e2 s13 s15 e3 r"
    assert told(4) == "s9 s11 e2 s13 s15 e3 r"
    assert told(8) == ""


def test_an_evaluation_that_a_stopped_run_owes_comes_first():
    assert told(6, False) == "e2 s13 s15 e3 r"
    assert told(6, False, best=[2]) == "e2 r s13 s15 e3 r"


def test_all_ranks_rest_after_the_step_in_which_one_wants_it():
    assert told(saves=[3]) == "s1 s3 r s5 e1 s7 s9 s11 e2 s13 s15 e3 r"
    assert told(stops=[3]) == "s1 s3 x"
    # A stop is prompt: the evaluation is left to the next start.
    assert told(stops=[5]) == "s1 s3 s5 x"


def test_the_checkpoint_after_an_epoch_is_taken_after_its_evaluation():
    assert told(saves=[5]) == "s1 s3 s5 e1 r s7 s9 s11 e2 s13 s15 e3 r"
    assert told(saves=[15], best=[1, 3]) == "s1 s3 s5 e1 r s7 s9 s11 e2 s13 s15 e3 r"


def test_workers_read_ahead_up_to_the_next_evaluation():
    strategy = Synchronous(COURSE, 1, Peers())
    items = list(strategy.items(0, True, Loop()))
    assert [list(item.ahead) for item in items[:4]] == [[3, 5], [5], [], [9, 11]]
    assert [item.is_evaluation_due for item in items[:4]] == [False, False, True, False]
