"""Check the options that say how replicas agree, and fill in what the user left open."""

from dataclasses import replace

from vigpipe.config.compress import parse_compress
from vigpipe.config.options import TrainConfig, as_given, flag
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError

# Strategies under which a run goes on without a replica that is lost. Replicas exchange something
# with one other at a time then.
OUTLIVING = ("gossip", "server")
# What a strategy other than synchronous takes if the user does not say otherwise.
_DEFAULTS = {"average_every": 20, "average": "weights", "items": "fixed", "final": "mean"}
_OUTER = {"outer_lr": 1.0, "outer_momentum": 0.5}
_OF_WEIGHTS = {"overlap": 0}  # with --strategy periodic
_GOSSIP = {"pairs": "any", "answer": "item", "gossip_between": "replicas"}
_SERVER = {"staleness": "none", "items": "fixed"}
_SUBNETWORKS = {"average_every": 20}
_OF_SUBNETWORKS = ("carry_moments", "partition_input", "divided", "branch_rescale")


def with_replication_defaults(config: TrainConfig) -> TrainConfig:
    """Check the options about replicas against one another, and resolve those left at `None`.

    Raises:
        InputError: two options do not go together.
    """
    config = _with_shards(_with_compress_defaults(config))
    for name in _OF_SUBNETWORKS:
        if (value := getattr(config, name)) and config.strategy != "subnetworks":
            raise InputError(
                f"{as_given(name, value)}: is for --strategy subnetworks, where each replica has "
                f"some of the channels, and --strategy is {config.strategy}; leave it out, or "
                "choose subnetworks"
            )
    if config.strategy == "synchronous":
        if config.replay is not None and not balances_parts(config):
            raise InputError(
                f"--replay {config.replay}: does again what replicas with steps of their own did, "
                "and with --strategy synchronous the same options give the same run; give those of "
                "that run too, with --config"
            )
        for name in (*_DEFAULTS, *_OUTER, *_OF_WEIGHTS, *_GOSSIP, "staleness"):
            if getattr(config, name) is not None:
                of = {"staleness": "server", **dict.fromkeys(_GOSSIP, "gossip")}
                strategy = of.get(name, "periodic")
                raise InputError(
                    f"{flag(name)} {getattr(config, name)}: says how replicas that take steps of "
                    "their own agree, and --strategy synchronous sums gradients in every step; "
                    f"leave it out, or add --strategy {strategy}"
                )
        return config
    _check_together(config)
    defaults = dict(
        {"server": _SERVER, "subnetworks": _SUBNETWORKS}.get(config.strategy, _DEFAULTS)
    )
    if config.average == "outer":
        defaults |= _OUTER
    if config.strategy == "gossip":
        defaults |= _GOSSIP
    elif config.strategy == "periodic" and config.average != "gradients":
        defaults |= _OF_WEIGHTS
    missing = {name: v for name, v in defaults.items() if getattr(config, name) is None}
    config = replace(config, **missing)
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
    """Check --compress against the other options, and choose the --sync that goes with it."""
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
    if config.strategy == "subnetworks":
        raise InputError(
            f"{what}: is for sums and averages of replicas, and with --strategy subnetworks each "
            "sends weights that no other one has; leave it out"
        )
    if config.strategy == "server":
        raise InputError(
            f"{what}: is for sums and averages of replicas, and with --strategy server each gives "
            "its gradient to the server alone; leave it out"
        )
    if config.average in (None, "weights") and method != "bfloat16":
        raise InputError(
            f"{what}: sends the largest part of a difference, and replicas that are averaged by "
            "their weights have no common weights that differences could be taken from; choose "
            "--compress bfloat16, or --average gradients or outer"
        )
    return config


def _with_shards(config: TrainConfig) -> TrainConfig:
    """Check --shards against how gradients are added up, and choose how a graph is shared."""
    if config.halo is not None and config.split != "halo":
        raise InputError(
            f"--halo {config.halo}: says what ranks with parts of a graph get of one another's, "
            f"and --split is {config.split or 'mixed'}; leave it out, or choose --split halo"
        )
    _check_mixed(config)
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
    return replace(config, split=config.split or "mixed")


def _check_mixed(config: TrainConfig) -> None:
    """Raise InputError where what --split mixed alone has is asked of another way, or twice."""
    travels, in_chunks = config.adjacency == "split", config.chunks > 1
    for what, is_given in (("adjacency split", travels), (f"chunks {config.chunks}", in_chunks)):
        if is_given and (config.shards == 1 or config.split == "halo"):
            way = "--split is halo" if config.split == "halo" else "--shards is 1"
            raise InputError(
                f"--{what}: is for ranks that share a graph with --split mixed, and {way}; leave "
                "it out"
            )
    if travels and in_chunks:
        raise InputError(
            f"--adjacency split with --chunks {config.chunks}: edges would travel for every chunk; "
            "leave one of the two out"
        )


def _check_together(config: TrainConfig) -> None:
    if config.strategy == "gossip":
        _check_gossip(config)
    if config.strategy == "subnetworks":
        _check_subnetworks(config)
    if config.strategy == "server":
        _check_server(config)
    elif config.staleness is not None:
        raise InputError(
            f"--staleness {config.staleness}: is for --strategy server, where gradients come late, "
            f"and --strategy is {config.strategy}; leave it out, or choose server"
        )
    strategy = f"--strategy {config.strategy}"
    if config.sync is not None:
        raise InputError(
            f"--sync {config.sync}: says how gradients are summed over replicas in every step, "
            f"which {strategy} does not do; leave it out"
        )
    if config.elastic:
        raise InputError(
            f"--elastic: changes the number of replicas, and with {strategy} a run has as many "
            "as it began with; leave it out"
        )
    for name in _GOSSIP:
        if getattr(config, name) is not None and config.strategy != "gossip":
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: is for --strategy gossip, where replicas "
                f"meet in pairs, and --strategy is {config.strategy}; leave it out, or choose "
                "gossip"
            )
    for name in _OUTER:
        if getattr(config, name) is not None and config.average != "outer":
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: is for --average outer, and --average is "
                f"{config.average or 'weights'}; leave it out, or choose outer"
            )
    is_gossip = config.strategy == "gossip"
    if config.overlap is not None and (is_gossip or config.average == "gradients"):
        what = f"--strategy is {config.strategy}" if is_gossip else "--average is gradients"
        raise InputError(
            f"--overlap {config.overlap}: is for averages of weights of all replicas, which travel "
            f"while each goes on, and {what}; leave it out, or choose --strategy periodic with "
            "--average weights or outer"
        )
    if config.timing or config.trace:
        raise InputError(
            f"{'--timing' if config.timing else '--trace'}: accounts for steps that all replicas "
            f"take together, which {strategy} has not; leave it out"
        )


def _check_server(config: TrainConfig) -> None:
    for name in (*_DEFAULTS, *_OUTER, *_OF_WEIGHTS):
        if getattr(config, name) is not None and name not in _SERVER:
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: is about replicas that are averaged, and "
                "with --strategy server all take the weights of the server; leave it out, or "
                "choose --strategy periodic"
            )


def _check_subnetworks(config: TrainConfig) -> None:
    what = "with --strategy subnetworks each replica trains other channels of one model"
    for name in (*_DEFAULTS, *_OUTER, *_OF_WEIGHTS):
        if getattr(config, name) is not None and name not in _SUBNETWORKS:
            raise InputError(
                f"{flag(name)} {getattr(config, name)}: is about replicas of the same model, and "
                f"{what}; leave it out, or choose --strategy periodic"
            )
    if config.ema:
        raise InputError(
            f"--ema {config.ema}: averages the weights of a model over its steps, and {what}, "
            "others in every round; take 0"
        )


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
