"""Check the options that say how replicas agree, and fill in what the user left open."""

from dataclasses import replace

from vigpipe.config.compress import parse_compress
from vigpipe.config.demands import check_demands, filled_in
from vigpipe.config.options import TrainConfig
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError

# Strategies under which a run goes on without a replica that is lost. Replicas exchange something
# with one other at a time then.
OUTLIVING = ("gossip", "server")
# What each replica does under strategies without sums and averages.
_SENT_ALONE = {
    "subnetworks": "sends weights that no other one has",
    "server": "gives its gradient to the server alone",
}


def with_replication_defaults(config: TrainConfig) -> TrainConfig:
    """Check the options about replicas against one another, and resolve those left at `None`."""
    config = filled_in(_with_shards(_with_compress_defaults(config)))
    check_demands(config)
    if config.strategy == "synchronous":
        if config.replay is not None and not balances_parts(config):
            raise InputError(
                f"--replay {config.replay}: does again what replicas with steps of their own did, "
                "and with --strategy synchronous the same options give the same run; give those of "
                "that run too, with --config"
            )
        return config
    if config.strategy == "gossip":
        _check_gossip(config)
    if config.strategy == "subnetworks" and config.ema:
        raise InputError(
            f"--ema {config.ema}: averages the weights of a model over its steps, and with "
            "--strategy subnetworks each replica trains other channels of one model, others in "
            "every round; take 0"
        )
    if config.overlap and config.overlap >= (config.average_every or 0):
        raise InputError(
            f"--overlap {config.overlap}: must be less than --average-every, which is "
            f"{config.average_every}, so that an average is applied before the next one begins"
        )
    return config


def balances_parts(config: TrainConfig) -> bool:
    """Whether the parts of a graph follow from measured times, so that no two runs are equal."""
    return config.repartition_every is not None and config.partition != "random"


def _with_compress_defaults(config: TrainConfig) -> TrainConfig:
    """Check --compress, and choose the --sync that goes with it."""
    method, what = parse_compress(config.compress).method, f"--compress {config.compress}"
    if method == "none":
        return config
    if config.dtype == "float16":
        raise InputError(
            f"{what}: keeps what it leaves out of a gradient for the next step, and with --dtype "
            "float16 the scale of the loss, and so the unit of gradients, changes meanwhile; "
            "choose --dtype bfloat16, or leave one of the two out"
        )
    if config.strategy == "synchronous":
        if config.dp == 1:
            return config
        if config.sync in ("double", "ddp"):
            raise InputError(
                f"--sync {config.sync}: sums whole gradients in a way of its own, and {what} sums "
                "compressed ones after the pipeline has drained; leave --sync out, or choose drain"
            )
        return replace(config, sync="drain")
    if config.strategy in _SENT_ALONE:
        raise InputError(
            f"{what}: is for sums and averages of replicas, and with --strategy {config.strategy} "
            f"each {_SENT_ALONE[config.strategy]}; leave it out"
        )
    if config.average in (None, "weights") and method != "bfloat16":
        raise InputError(
            f"{what}: sends the largest part of a difference, and replicas that are averaged by "
            "their weights have no common weights that differences could be taken from; choose "
            "--compress bfloat16, or --average gradients or outer"
        )
    return config


def _with_shards(config: TrainConfig) -> TrainConfig:
    """Check --shards and --halo, and choose how a graph is shared."""
    if config.halo == "stale" and config.recompute != "never":
        raise InputError(
            f"--halo stale with --recompute {config.recompute}: a repeated forward would take what "
            "came after the first one; leave one of the two out"
        )
    if config.shards == 1:
        return config
    what = f"--shards {config.shards}"
    if config.sync == "ddp":
        raise InputError(
            f"--sync ddp: adds gradients up during the backward, in which the ranks of {what} "
            "exchange rows; leave it out, or choose double or drain"
        )
    if config.strategy == "subnetworks":
        raise InputError(
            f"{what}: lets ranks share the channels of a model, and with --strategy subnetworks "
            "each replica has some of them already; leave one of the two out"
        )
    if MODEL_DEFAULTS[config.model].job == "images":
        return config
    if config.adjacency == "split" and config.chunks > 1:
        raise InputError(
            f"--adjacency split with --chunks {config.chunks}: edges would travel for every chunk; "
            "leave one of the two out"
        )
    return replace(config, split=config.split or "mixed")


def _check_gossip(config: TrainConfig) -> None:
    if config.average == "outer":
        raise InputError(
            "--average outer: needs the mean of all replicas, and with --strategy gossip two at a "
            "time are averaged; choose --average weights, or --strategy periodic"
        )
    if config.pairs == "sets":
        if config.dp % 2 and config.gossip_between != "hosts":
            raise InputError(
                f"--pairs sets: even replicas draw odd ones, so their number must be even, and "
                f"--dp is {config.dp}; choose --pairs any, or another --dp"
            )
        if config.answer == "interval":
            raise InputError(
                "--answer interval: with --pairs sets a replica that was drawn comes after its "
                "next item; leave it out, or choose --pairs any"
            )
