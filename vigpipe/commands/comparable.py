"""Whether `vigpipe check` has something to compare; does not import torch."""

from vigpipe.config.halo import parse_halo
from vigpipe.config.options import TrainConfig
from vigpipe.config.replication import with_replication_defaults
from vigpipe.errors import InputError


def check_comparable(config: TrainConfig, num_steps: int) -> None:
    """Raise InputError if a run does not train like one rank, or averages nothing."""
    if num_steps < 1:
        raise InputError(f"--compare-steps {num_steps}: must be at least 1")
    if config.compress != "none":
        raise InputError(
            f"--compress {config.compress}: changes the numbers, and vigpipe check compares "
            "with a model whose replicas send everything; leave it out"
        )
    if parse_halo(config.halo).method != "exact":
        raise InputError(
            f"--halo {config.halo}: does not train like one rank, so there is nothing to "
            "compare; leave it out"
        )
    every = with_replication_defaults(config).average_every
    if every is not None and every > num_steps:
        raise InputError(
            f"--compare-steps {num_steps}: expected at least one average, and --average-every is "
            f"{every}; compare {every} steps or more, or lower --average-every"
        )
