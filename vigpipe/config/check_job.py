"""Check the options of a run against what its model is for."""

from typing import get_args

from vigpipe.config.choices import OF_LAYERS, GraphNorm, Norm
from vigpipe.config.options import OPTIONS, TrainConfig, as_given, flag, given, parse_fanout
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.replication import balances_parts
from vigpipe.errors import InputError

_SCORES = {"images": ("top1", "loss"), "graph": ("accuracy", "micro_f1", "macro_f1", "loss")}
_NORMS = {"images": get_args(Norm), "graph": get_args(GraphNorm)}


def check_job(config: TrainConfig) -> None:
    """Raise InputError if an option that was given is for models of another kind."""
    job = MODEL_DEFAULTS[config.model].job
    what = "images" if job == "graph" else "a graph"
    model = f"{config.model} is a model of {'a graph' if job == 'graph' else 'images'}"
    for name, value in given(config).items():
        if OPTIONS[name].job not in (None, job):
            raise InputError(
                f"{as_given(name, value)}: is for {what}, and {model}; leave it out, or choose "
                "another --model"
            )
    for name, choices in (("norm", _NORMS[job]), ("keep_best", _SCORES[job])):
        value = getattr(config, name)
        if value not in (None, *choices):
            raise InputError(f"{flag(name)} {value}: {model}, so choose {' or '.join(choices)}")
    if config.items == "own" and config.sampler != "parts":
        raise InputError(
            "--items own: is for a graph that is cut into parts, some of which are those of one "
            "replica only; choose fixed or pool, or --sampler parts"
        )
    _check_repartition(config)
    _check_fanout(config)
    _check_sparse_threads(config)


def _check_fanout(config: TrainConfig) -> None:
    num_layers = config.layers or MODEL_DEFAULTS[config.model].layers
    num_fanouts = len(parse_fanout(config.fanout))
    if num_fanouts > 1 and num_fanouts != num_layers:
        raise InputError(
            f"--fanout {config.fanout}: has numbers for {num_fanouts} layers, and the model has "
            f"{num_layers}; give one for each, or one for all"
        )


def _check_repartition(config: TrainConfig) -> None:
    what = f"--repartition-every {config.repartition_every}"
    if config.repartition_every is None:
        return
    if config.items == "own":
        raise InputError(
            f"{what}: moves nodes from part to part, and with --items own the parts of a replica "
            "are its own; leave one of the two out"
        )
    if balances_parts(config) and config.strategy != "synchronous":
        raise InputError(
            f"{what}: balances {config.partition or 'metis'} parts by what all replicas have taken "
            f"by the end of an epoch, and with --strategy {config.strategy} they do not come to it "
            "together; choose --partition random, or --strategy synchronous"
        )


def _check_sparse_threads(config: TrainConfig) -> None:
    what = f"--sparse-threads {config.sparse_threads}"
    if not config.sparse_threads:
        return
    if config.shards > 1:
        raise InputError(
            f"{what}: sums on threads of a rank that has all nodes of a sub-graph, and with "
            f"--shards {config.shards} ranks share them; leave one of the two out"
        )
    if config.sampler in OF_LAYERS:
        raise InputError(
            f"{what}: sums over the same edges in every layer, and with --sampler {config.sampler} "
            "each has its own; leave it out, or choose full, parts or a saint sampler"
        )
    if config.dtype in ("bfloat16", "float16"):
        raise InputError(
            f"{what}: sums and multiplies in the precision of the weights, and --dtype is "
            f"{config.dtype}; leave it out, or choose float32 or float64"
        )
