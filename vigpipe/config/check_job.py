"""Check the options of a run against what its model is for."""

from typing import get_args

from vigpipe.config.choices import GraphNorm, Norm
from vigpipe.config.of_jobs import OF_GRAPHS, OF_IMAGES
from vigpipe.config.options import TrainConfig, as_given, flag
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.replication import balances_parts
from vigpipe.errors import InputError

_OF_PARTS = ("partition", "parts", "repartition_every", "merge")
_SCORES = {
    "images": ("top1", "loss"),
    "graph": ("accuracy", "micro_f1", "macro_f1", "loss"),
}
_NORMS = {"images": get_args(Norm), "graph": get_args(GraphNorm)}
_NOTHING_SAID = TrainConfig()


def check_job(config: TrainConfig) -> None:
    """Check the options against what the model is for.

    Args:
        config: the options as the user gave them.

    Raises:
        InputError: an option is for models of another kind.
    """
    job = MODEL_DEFAULTS[config.model].job
    others, what = (OF_IMAGES, "images") if job == "graph" else (OF_GRAPHS, "a graph")
    model = f"{config.model} is a model of {'a graph' if job == 'graph' else 'images'}"
    for name in others:
        value = getattr(config, name)
        if value != getattr(_NOTHING_SAID, name):
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
    for name in _OF_PARTS:
        value = getattr(config, name)
        if value is not None and config.sampler != "parts":
            raise InputError(
                f"{as_given(name, value)}: is for --sampler parts, and --sampler is "
                f"{config.sampler or 'full'}; choose parts, or leave it out"
            )


def _check_repartition(config: TrainConfig) -> None:
    """Check --repartition-every against what says whose the parts are."""
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
