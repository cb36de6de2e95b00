r"""One training step, event by event: who computes, waits for a transfer, adds gradients up, when.

A rank takes its actions in their order. An action starts when the rank is free and its input has
arrived:

    sender     [forward 0]                        the sender goes on at once
                          \__ transfer __
    receiver   [ .....  busy ..... ][wait input  ][forward 0]

A transfer begins when the sender has ended and the receiver asks for it, and torch's schedules of
one stage a rank ask when they get to the action; those of several stages ask ahead, so that the
transfer above would begin at the sender's end and be hidden. Ranks of a host that compute at once
share it: with n of them each proceeds at 1 / slowdown[n - 1] of its speed (processor sharing), and
the speeds change at every event.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vigpipe.planning.engine import Operation, Simulation
from vigpipe.schedules import Orders
from vigpipe.spans import WAITING, Span


@dataclass(frozen=True)
class StageCosts:
    """What the stages of one pipeline cost; replicas cost the same. All in seconds.

    Attributes:
        forward: by stage and micro-batch, of a rank that computes alone.
        backward: likewise.
        features: transfer from stage i to stage i + 1, by i; free between stages of one rank.
        gradients: transfer from stage i + 1 back to stage i, by i.
        dispatch: of a rank for every forward or backward, beside the two.
        reduce: adding the gradients of a stage up over the replicas, by stage.
        update: of the weights and all else once a step, by position of the rank.
    """

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    features: Sequence[float]
    gradients: Sequence[float]
    dispatch: float
    reduce: Sequence[float]
    update: Sequence[float]


def simulate(
    orders: Orders,
    costs: StageCosts,
    num_replicas: int = 1,
    slowdown: Sequence[float] | None = None,
    ranks_per_host: int | None = None,
    *,
    reduce_before_send: bool = False,
    ask_ahead: bool = False,
    distinct: bool = False,
) -> list[Span]:
    """Simulate a training step of all ranks.

    Args:
        orders: of one pipeline; rank = replica_index * len(orders) + position.
        costs: of its stages.
        num_replicas: D; with one there is no all-reduce.
        slowdown: times as long an action takes while 1, 2, ... ranks of its host compute. Beyond
            its end n ranks take turns: the last value times n / len(slowdown). None: ranks do not
            hinder one another.
        ranks_per_host: hosts are filled in the order of ranks; None: one host has them all.
        reduce_before_send: a stage's gradients are added up inside its last backward, before the
            gradient of its input leaves (DDP); else once after a rank's last action.
        ask_ahead: receives are posted before the rank gets to them.
        distinct: leave out the replicas that do the same as the first, where all do.

    Returns:
        The spans of every rank from 0 to its own end, without gap or overlap.

    Raises:
        ValueError: the orders wait for one another.
    """
    num_ranks = len(orders)
    simulated = num_simulated(num_ranks, num_replicas, slowdown, ranks_per_host)
    programs = [
        _program(orders, position, costs, num_replicas > 1, reduce_before_send)
        for position in range(num_ranks)
    ] * simulated
    host_size = min(ranks_per_host or len(programs), len(programs))
    copies = 1  # for how many ranks of its host each simulated one stands
    if simulated < num_replicas:
        copies = (ranks_per_host or num_ranks * num_replicas) // num_ranks or 1
    factors = [stretch(slowdown, n * copies) for n in range(host_size + 1)]
    spans = Simulation(programs, num_ranks, factors, host_size, ask_ahead).spans()
    if distinct or simulated == num_replicas:
        return spans
    return [
        span._replace(rank=span.rank + replica_index * num_ranks)
        for replica_index in range(num_replicas)
        for span in spans
    ]


def num_simulated(
    num_ranks: int,
    num_replicas: int,
    slowdown: Sequence[float] | None,
    ranks_per_host: int | None,
) -> int:
    """Replicas that one simulation must follow.

    One is enough where all share their hosts in the same way: they do the same at the same time.
    """
    if slowdown is None or ranks_per_host is None or num_ranks % ranks_per_host == 0:
        return 1
    replicas_per_host, rest = divmod(ranks_per_host, num_ranks)
    return 1 if rest == 0 and num_replicas % replicas_per_host == 0 else num_replicas


def stretch(slowdown: Sequence[float] | None, num_computing: int) -> float:
    """How many times as long an action takes while so many ranks of its host compute."""
    if slowdown is None or num_computing == 0:
        return 1.0
    if num_computing <= len(slowdown):
        return slowdown[num_computing - 1]
    return slowdown[-1] * num_computing / len(slowdown)


def bubble(spans: Sequence[Span]) -> float:
    """Share of the schedule that ranks wait.

    The schedule lasts from the first start to the last end of a backward over all ranks; a rank
    that has ended its own last backward waits until then, whatever it does meanwhile. Equal stages:
    (S - 1) / (M + S - 1).
    """
    last_backward: dict[int, float] = {}
    for span in spans:
        if span.kind == "backward":
            last_backward[span.rank] = max(span.end, last_backward.get(span.rank, 0.0))
    if not last_backward:
        return 0.0
    end = max(last_backward.values())
    duration = end - min(span.start for span in spans)
    waits = sum(end - own for own in last_backward.values())
    waits += sum(
        span.seconds
        for span in spans
        if span.kind in WAITING and span.end <= last_backward.get(span.rank, 0.0)
    )
    return waits / (duration * len(last_backward)) if duration else 0.0


def _program(
    orders: Orders,
    position: int,
    costs: StageCosts,
    reduces: bool,
    reduce_before_send: bool,
) -> list[Operation]:
    num_ranks, num_stages, num_microbatches = len(orders), len(costs.forward), len(costs.forward[0])
    alone = num_ranks == 1
    left = {stage: num_microbatches for stage in range(position, num_stages, num_ranks)}
    program: list[Operation] = []
    for kind, stage, microbatch in orders[position]:
        # Message 2 * (stage * M + m) is what forward m of the stage gives, the next one its
        # backward's.
        own = 2 * (stage * num_microbatches + microbatch)
        if kind == "forward":
            seconds = costs.forward[stage][microbatch] + costs.dispatch
            received = not alone and stage > 0
            needs = own - 2 * num_microbatches if received else -1
            transfer = costs.features[stage - 1] if received else 0.0
            gives = own
        else:
            seconds = costs.backward[stage][microbatch] + costs.dispatch
            received = not alone and stage < num_stages - 1
            needs = own + 1 + 2 * num_microbatches if received else -1
            transfer = costs.gradients[stage] if received else 0.0
            gives = own + 1
            left[stage] -= 1
            if reduces and reduce_before_send and left[stage] == 0:
                program.append(
                    Operation(kind, stage, microbatch, seconds, needs, transfer, gives=-1)
                )
                program.append(
                    Operation(
                        "all-reduce", stage, -1, costs.reduce[stage], gives=gives, meeting=stage
                    )
                )
                continue
        program.append(Operation(kind, stage, microbatch, seconds, needs, transfer, gives))
    if reduces and not reduce_before_send:
        seconds = sum(costs.reduce[stage] for stage in left)
        program.append(Operation("all-reduce", -1, -1, seconds, meeting=position))
    if costs.update[position]:
        program.append(Operation("optimizer", -1, -1, costs.update[position]))
    return program
