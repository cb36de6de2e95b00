"""Make the strategy that the options name."""

from collections.abc import Sequence

from vigpipe.config.options import TrainConfig
from vigpipe.replication.course import Course
from vigpipe.replication.gossip import Gossip
from vigpipe.replication.own_steps import Weights
from vigpipe.replication.periodic import Periodic
from vigpipe.replication.place import Place
from vigpipe.replication.record import Recorded
from vigpipe.replication.server import Server, Worker
from vigpipe.replication.strategy import Strategy
from vigpipe.replication.subnetworks.strategy import Subnetworks
from vigpipe.replication.synchronous import Synchronous


def make_strategy(
    options: TrainConfig,
    course: Course,
    place: Place,
    weights: Weights,
    recorded: Sequence[Recorded] | None = None,
) -> Strategy:
    """Make the strategy of a rank.

    Args:
        options: the resolved options; `strategy` names it.
        course: the steps of the run.
        place: this rank among the others.
        weights: those of this rank's stages.
        recorded: what each replica is to do again; None if it is free.
    """
    if options.strategy == "synchronous":
        return Synchronous(course, place.of_team, place.peers, place.between)
    server = Server if place.is_server else Worker
    own_steps = {
        "periodic": Periodic,
        "gossip": Gossip,
        "server": server,
        "subnetworks": Subnetworks,
    }[options.strategy]
    return own_steps(options, course, place, weights, recorded)
