"""Made-up costs of the ways to use ranks on a graph."""

from tests.planning.profiles import make_profile
from vigpipe.planning.ways import Layers, Links, Measured, Way

MB = 10**6
# An exchange takes 1 ms, and 1 ms more for every MB; a sum as much.
LINKS = Links(2, ((0, 1e-3), (MB, 2e-3)), ((0, 1e-3), (MB, 2e-3)), 5e-3, 1e-4, 1e9)


def make_layers(num_microbatches=1, stages=((0, 1), (2, 3)), seconds=1.0):
    """Four blocks that take 3 `seconds` each for one row, and hand 100 bytes to the next."""
    profile = make_profile([seconds] * 4)
    profile = type(profile)(
        **{
            **{name: getattr(profile, name) for name in profile.__dataclass_fields__},
            "base_bytes": 90 * MB,
            "rows": (),
            "amounts": ("nodes",),
            **{name: _with_amounts(getattr(profile, name)) for name in ("stem", "readout")},
            "blocks": tuple(_with_amounts(block, seconds, 100.0) for block in profile.blocks),
        }
    )
    return Layers(profile, stages, num_microbatches, 1.0, (), 1.0)


def _with_amounts(piece, seconds=0.0, boundary=0.0):
    return type(piece)(
        piece.name, (seconds, 0.0), (2 * seconds, 0.0), (10.0, 0.0), (boundary, 0.0), 0
    )


ONE = Way("one rank", "", True, 1, 1, seconds=(12.0,), peak_bytes=100 * MB)
MIXED = Way(
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
HALO = Way(
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
REPLICAS = Way(
    "replicas of parts",
    "--sampler parts --dp 2",
    False,
    2,
    20,
    seconds=(0.2, 0.22),
    gradient_bytes=2 * MB,
    peak_bytes=40 * MB,
)
LAYERS = Way("layers", "--stages 2", True, 2, 1, layers=make_layers())
NONE = Way("many", "--stages 9", True, 9, 1, why_not="there are 4 blocks")


def make_measured(*ways, links=LINKS):
    """The costs of some ways, by default one of each kind."""
    return Measured("made", {}, 2, ways or (ONE, MIXED, HALO, REPLICAS, LAYERS), links, {})
