"""Made-up costs of the ways to use ranks on a graph."""

from dataclasses import replace

from tests.planning.profiles import make_profile
from vigpipe.planning.profile import Piece
from vigpipe.planning.ways import Layers, Links, Measured, MeasuredWay

MB = 10**6
# An exchange takes 1 ms, and 1 ms more for every MB; a sum as much.
LINKS = Links(2, ((0, 1e-3), (MB, 2e-3)), ((0, 1e-3), (MB, 2e-3)), 5e-3, 1e-4, 1e9)


def _piece(name, seconds=0.0, boundary=0.0):
    """A piece whose costs are those of its nodes alone."""
    forward, backward = (seconds, 0.0), (2 * seconds, 0.0)
    return Piece(name, forward, backward, (10.0, 0.0), (boundary, 0.0), 0)


# Four blocks that take 3 seconds each for one row, and hand 100 bytes to the next.
PROFILE = replace(
    make_profile(
        [_piece(f"block {i}", 1.0, 100.0) for i in range(4)],
        _piece("stem"),
        _piece("readout"),
        base_bytes=90 * MB,
        amounts=("nodes",),
    ),
    rows=(),
)


ONE = MeasuredWay("one rank", "", True, 1, 1, seconds=(12.0,), peak_bytes=100 * MB)
MIXED = MeasuredWay(
    "mixed",
    "--shards 2 --split mixed",
    True,
    2,
    1,
    seconds=(6.0, 6.6),
    exchanges=((0.5 * MB, 10), (2 * MB, 4)),
    sums=((MB, 3),),
    exchanged_bytes=26 * MB,
    gradient_bytes=2 * MB,
    peak_bytes=60 * MB,
)
HALO = MeasuredWay(
    "halo",
    "--shards 2 --split halo",
    True,
    2,
    1,
    seconds=(7.0, 7.7),
    exchanges=((0.25 * MB, 8),),
    exchanged_bytes=4 * MB,
    gradient_bytes=2 * MB,
    peak_bytes=70 * MB,
    sources=1.9,
)
REPLICAS = MeasuredWay(
    "replicas of parts",
    "--sampler parts --dp 2",
    False,
    2,
    20,
    seconds=(0.2, 0.22),
    gradient_bytes=2 * MB,
    peak_bytes=40 * MB,
)
PIPELINE = Layers(PROFILE, ((0, 1), (2, 3)), 1, 1.0, (), 1.0)
LAYERS = MeasuredWay(
    "layers", "--stages 2", True, 2, 1, layers=Layers(PROFILE, ((0, 1), (2, 3)), 1, 1.0, (), 1.0)
)
NONE = MeasuredWay("many", "--stages 9", True, 9, 1, why_not="there are 4 blocks")


def make_measured(*ways, links=LINKS):
    """The costs of some ways, by default one of each kind."""
    return Measured("made", {}, 2, ways or (ONE, MIXED, HALO, REPLICAS, LAYERS), links, {})
