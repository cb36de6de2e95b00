"""Try an exchange with another replica: it succeeds on all ranks of this replica, or on none."""

from collections.abc import Callable
from typing import TypeVar

from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Peers, Status, agree

T = TypeVar("T")


def attempt(work: Callable[[], T], peers: Peers) -> tuple[T | None, bool]:
    """Do work that fails if another replica is lost; all ranks of this replica call this together.

    Returns:
        What the work has returned, and whether it has succeeded on all of the peers.
    """
    result, is_done = None, True
    try:
        result = work()
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        is_done = False
    return result, agree(Status(finite=is_done), peers).finite
