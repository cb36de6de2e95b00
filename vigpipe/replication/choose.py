"""Make the strategy that the options name."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from vigpipe.config.options import TrainConfig
from vigpipe.replication.course import Course
from vigpipe.replication.own_steps import OwnSteps, Weights
from vigpipe.replication.position import Position
from vigpipe.replication.record import Recorded
from vigpipe.replication.server import Server
from vigpipe.replication.subnetworks.rows import Wide
from vigpipe.replication.subnetworks.strategy import Subnetworks
from vigpipe.replication.synchronous import Synchronous

# Where the others are, whose replicas take steps of their own.
_OWN_STEPS = {
    "periodic": "periodic:Periodic",
    "gossip": "gossip:Gossip",
    "server": "server:Worker",
}


def make_strategy(
    options: TrainConfig,
    course: Course,
    position: Position,
    weights: Weights,
    recorded: Sequence[Recorded] | None = None,
    describe_wide: Callable[[], Wide] | None = None,
) -> Synchronous | OwnSteps:
    """Make the strategy of a rank, which does what was `recorded` again, if anything was."""
    if options.strategy == "synchronous":
        return Synchronous(course, position.replica_in_team, position.peers)
    own = options, course, position, weights, recorded
    if options.strategy == "subnetworks":
        assert describe_wide is not None
        return Subnetworks(describe_wide(), *own)
    if position.is_server:
        return Server(*own)
    return resolve_name(f"{__package__}.{_OWN_STEPS[options.strategy]}")(*own)
