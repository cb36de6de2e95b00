"""Make the strategy that the options name."""

from collections.abc import Callable, Sequence

from vigpipe.config.options import TrainConfig
from vigpipe.replication.course import Course
from vigpipe.replication.gossip import Gossip
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.periodic import Periodic
from vigpipe.replication.place import Place
from vigpipe.replication.record import Recorded
from vigpipe.replication.server import Server, Worker
from vigpipe.replication.subnetworks.rows import Wide
from vigpipe.replication.subnetworks.strategy import Subnetworks
from vigpipe.replication.synchronous import Synchronous


def make_strategy(
    options: TrainConfig,
    course: Course,
    place: Place,
    weights: Weights,
    recorded: Sequence[Recorded] | None = None,
    describe_wide: Callable[[], Wide] | None = None,
) -> Synchronous | OwnSteps:
    """Make the strategy of a rank.

    Args:
        options: the resolved options; `strategy` names it.
        course: the steps of the run.
        place: this rank among the others.
        weights: those of this rank's stages.
        recorded: what each replica is to do again; None if it is free.
        describe_wide: describes the wide model of sub-networks; nobody else needs it.
    """
    match options.strategy:
        case "synchronous":
            return Synchronous(course, place.of_team, place.peers)
        case "periodic":
            return Periodic(options, course, place, weights, recorded)
        case "gossip":
            return Gossip(options, course, place, weights, recorded)
        case "server":
            kind = Server if place.is_server else Worker
            return kind(options, course, place, weights, recorded)
        case "subnetworks":
            assert describe_wide is not None
            wide = describe_wide()
            return Subnetworks(options, course, place, weights, recorded, wide)
