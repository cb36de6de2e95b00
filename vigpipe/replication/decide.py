"""Decide, on the first rank of a replica, what it does next: items, averages, rests, the end."""

from collections.abc import Iterator

from vigpipe.replication.course import Course
from vigpipe.replication.decisions import Action, Decision
from vigpipe.replication.member import Member, NoItem
from vigpipe.replication.table import Table


def decide(member: Member) -> Iterator[Decision | None]:
    """Yield the decisions of one replica, and None while it waits for others.

    The leader, the first of the replicas that are left, evaluates its weights after an epoch.
    """
    gradients = member.rules.gradients
    item: int | NoItem = NoItem.CLOSED
    while True:
        yield from _lead(member)
        # Weights are averaged between two steps. So are gradients once the pool has nothing left:
        # others then come to an average with their last ones, and this replica has none to give.
        if not gradients or item is NoItem.NONE_LEFT:
            came = yield from member.average(in_step=False)
            if came.action in (Action.AVERAGE, Action.GIVE):
                yield came
                continue
        item = member.take()
        if item is NoItem.CLOSED:
            yield Decision(Action.TELL)
            if (yield from member.rest()):
                yield from _lead(member)
                yield decision_of_rest(member.see(), member.rules.course)
        elif isinstance(item, NoItem):  # NONE_LEFT; it is never TOO_EARLY without a server
            yield Decision(Action.TELL)
            if member.leaves_early:
                member.leave()
                yield Decision(Action.LEAVE)
                return
            if (yield from member.finish()):
                yield from _lead(member)
                yield Decision(Action.END)
                return
        elif member.is_leader and (epoch := member.epoch_to_evaluate(item)):
            yield Decision(Action.EVALUATE, epoch)
        else:
            yield Decision(Action.TAKE, item, member.ahead)
            if gradients:
                came = yield from member.average(in_step=True)
                yield came
                if came.action is Action.NO_STEP:
                    continue
            member.finish_item()


def _lead(member: Member) -> Iterator[Decision]:
    if member.became_leader():
        yield Decision(Action.LEAD)


def decision_of_rest(table: Table, course: Course) -> Decision:
    """Return the decision to save, and perhaps to stop, on which all have agreed."""
    return Decision(Action.STOP if table.stops else Action.REST, course.steps_with(table.rested))
