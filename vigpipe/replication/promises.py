"""Check that a record is one that a run with some options can have left, before it is followed.

`record.collect` has checked each replica's rows by themselves. What the replicas promise together
is checked here, since one that misses an average, say, would let all others wait for ever.
"""

from collections.abc import Sequence

from vigpipe.replication.member import Rules
from vigpipe.replication.record import Recorded

_TOGETHER = ("periodic", "subnetworks")  # strategies that average all replicas at once


def check_promises(
    recorded: Sequence[Recorded], rules: Rules, strategy: str, *, is_whole: bool
) -> None:
    """Raise ValueError if a record breaks what a strategy promises.

    A record that is not whole is of a run that was stopped: all rested, and some items are left.
    """
    _check_kinds(recorded, strategy)
    _check_items(recorded, rules)
    num_left = rules.course.num_items - sum(len(of.items) for of in recorded)
    nobody_lost = not any(of.is_lost for of in recorded)
    if is_whole and num_left and nobody_lost:
        raise ValueError(f"{num_left} of the run's {rules.course.num_items} items are not there")
    if strategy in _TOGETHER:
        last = rules.course.num_steps - (strategy == "subnetworks")  # no average after the last
        _check_averages(recorded, rules, last, is_whole=not num_left)
    for replica, of in enumerate(recorded):
        for pair in of.pairs:
            if pair.step > len(of.items):
                raise ValueError(
                    f"replica {replica} is averaged with {pair.partner} in step {pair.step}, for "
                    "which there is no item"
                )
            if rules.in_sets and (replica - pair.partner) % 2 == 0:
                raise ValueError(f"replicas {replica} and {pair.partner} are never drawn as a pair")
    if strategy == "server":
        _check_evaluations(recorded, rules)


def _check_kinds(recorded: Sequence[Recorded], strategy: str) -> None:
    for replica, of in enumerate(recorded):
        wrong = {
            "an average of all": of.averages and strategy not in _TOGETHER,
            "an average of two": of.pairs and strategy != "gossip",
            "a gradient for a server": of.pushes and strategy != "server",
            "an item without its gradient": strategy == "server" and len(of.pushes) < len(of.items),
            "its loss, which ends such a run": of.is_lost and strategy in _TOGETHER,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(f"replica {replica} has {what}, and --strategy is {strategy}")
    if all(of.is_lost for of in recorded):
        raise ValueError("all replicas were lost")


def _check_items(recorded: Sequence[Recorded], rules: Rules) -> None:
    course = rules.course
    nobody_lost = not any(of.is_lost for of in recorded)
    takers: dict[int, int] = {}
    for replica, of in enumerate(recorded):
        for number, item in enumerate(items := [*of.items, *of.undone]):
            if item >= course.num_items:
                raise ValueError(
                    f"replica {replica} has taken item {item}, and the run's are 0 … "
                    f"{course.num_items - 1}"
                )
            own = replica + number * course.num_replicas
            if nobody_lost and not rules.from_pool and item != own:
                raise ValueError(f"replica {replica} has taken item {item}, expected {own}")
            if of.is_lost and rules.gradients and number == len(items) - 1:
                continue  # it may have been lost within that step, and another has done it again
            if item in takers:
                raise ValueError(
                    f"item {item} was taken twice, by the replicas {takers[item]} and {replica}"
                )
            takers[item] = replica


def _check_averages(
    recorded: Sequence[Recorded], rules: Rules, last: int, *, is_whole: bool
) -> None:
    """Check averages of all replicas; each is there, unless all have rested before they came."""
    every, num_replicas = rules.average_every, rules.course.num_replicas
    num_all = sum(len(of.items) for of in recorded)
    most = max(range(num_replicas), key=lambda replica: len(recorded[replica].averages))
    for replica, of in enumerate(recorded):
        num = len(of.averages)
        if num < len(recorded[most].averages):
            raise ValueError(
                f"replica {replica} has come to {num} averages, and replica {most} to "
                f"{len(recorded[most].averages)}, which would wait for it for ever"
            )
        num_steps = num_all // num_replicas if rules.from_pool else len(of.items)
        due = min(num_steps, last) // every
        if not due - (not is_whole) <= num <= due:
            raise ValueError(
                f"replica {replica} has come to {num} averages, expected {due}, one every {every} "
                "steps"
            )
        for number, step in enumerate(of.averages, 1):
            if not rules.from_pool and step != number * every:
                raise ValueError(
                    f"replica {replica} has come to average {number} at step {step}, expected "
                    f"{number * every}"
                )


def _check_evaluations(recorded: Sequence[Recorded], rules: Rules) -> None:
    """Check that a server has taken all gradients before an evaluation, when all rest."""
    course = rules.course
    pushes = [pair for of in recorded for pair in zip(of.pushes, of.items, strict=True)]
    version = first = due = 0
    for push, item in sorted(pushes, key=lambda pair: pair[0].served):
        step = (push.served - 1) // course.num_replicas
        if step >= due:  # the evaluation before it is over
            due, first = course.next_evaluation(step), version
        if item // course.num_replicas >= due or push.pulled < first:
            raise ValueError(
                f"item {item} was begun before the evaluation after {due} steps; give the same "
                "--evaluate-every"
            )
        version = push.version
