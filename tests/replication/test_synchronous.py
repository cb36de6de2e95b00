"""The turns of ranks that take every step together."""

from vigpipe.parallel.agreement import Agreement, Peers, Status
from vigpipe.replication.course import Course
from vigpipe.replication.strategy import Evaluate, Rest, TakeItem
from vigpipe.replication.synchronous import Synchronous

COURSE = Course(num_steps=8, steps_per_epoch=3, evaluate_every=1, num_replicas=2)


def turns(first_step=0, is_evaluated=True, *, saves=(), stops=(), best=()):
    """What replica 1 does: s3 is a step with item 3, e2 an evaluation, r a rest, x the last one.

    Args:
        first_step: steps done before.
        is_evaluated: whether they were evaluated.
        saves: items after which a rank wants to save.
        stops: items after which a rank wants to stop.
        best: epochs whose evaluation is the best so far.
    """
    strategy = Synchronous(COURSE, 1, Peers(4))
    told = []
    for turn in strategy.turns(first_step, is_evaluated):
        match turn:
            case TakeItem(item):
                told.append(f"s{item}")
                others = Status(save=item in saves, stop=item in stops)
                strategy.hear(Agreement([Status(), others]))
            case Evaluate(epoch):
                told.append(f"e{epoch}")
                if epoch in best:
                    strategy.ask_to_save()
            case Rest(_, stop):
                told.append("x" if stop else "r")
                if stop:
                    break
    return " ".join(told)


def test_every_epoch_and_the_last_step_end_with_an_evaluation():
    assert turns() == "s1 s3 s5 e1 s7 s9 s11 e2 s13 s15 e3 r"
    assert turns(4) == "s9 s11 e2 s13 s15 e3 r"
    assert turns(8) == ""


def test_an_evaluation_that_a_stopped_run_owes_comes_first():
    assert turns(6, False) == "e2 s13 s15 e3 r"
    assert turns(6, False, best=[2]) == "e2 r s13 s15 e3 r"


def test_all_ranks_rest_after_the_step_in_which_one_wants_it():
    assert turns(saves=[3]) == "s1 s3 r s5 e1 s7 s9 s11 e2 s13 s15 e3 r"
    assert turns(stops=[3]) == "s1 s3 x"
    # A stop is prompt: the evaluation is left to the next start.
    assert turns(stops=[5]) == "s1 s3 s5 x"


def test_the_checkpoint_after_an_epoch_is_taken_after_its_evaluation():
    assert turns(saves=[5]) == "s1 s3 s5 e1 r s7 s9 s11 e2 s13 s15 e3 r"
    assert turns(saves=[15], best=[1, 3]) == "s1 s3 s5 e1 r s7 s9 s11 e2 s13 s15 e3 r"


def test_workers_read_ahead_up_to_the_next_evaluation():
    strategy = Synchronous(COURSE, 1, Peers())
    steps = [turn for turn in strategy.turns(0, True) if isinstance(turn, TakeItem)]
    assert [list(step.ahead) for step in steps[:4]] == [[3, 5], [5], [], [9, 11]]
    assert [step.is_evaluation_due for step in steps[:4]] == [False, False, True, False]
