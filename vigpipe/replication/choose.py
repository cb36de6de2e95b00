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

    With `recorded`, each replica does that again. Only sub-networks need `describe_wide`.
    """
    match options.strategy:
        case "synchronous":
            return Synchronous(course, place.of_team, place.peers)
        case "periodic":
            return Periodic(options, course, place, weights, recorded)
        case "gossip":
            return Gossip(options, course, place, weights, recorded)
        case "server":
            role = Server if place.is_server else Worker
            return role(options, course, place, weights, recorded)
        case "subnetworks":
            assert describe_wide is not None
            return Subnetworks(options, course, place, weights, recorded, describe_wide())
