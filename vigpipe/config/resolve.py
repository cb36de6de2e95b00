"""Check all that options say by themselves, and fill in those that the user left open."""

from vigpipe.config.check_job import check_job
from vigpipe.config.of_weights import follow_weights
from vigpipe.config.options import TrainConfig, check_numbers, with_model_defaults
from vigpipe.config.replication import with_replication_defaults


def resolved(config: TrainConfig) -> TrainConfig:
    """Return a user's options as a run has them before it has seen its data."""
    check_numbers(config)
    config = follow_weights(config)
    check_job(config)
    return with_replication_defaults(with_model_defaults(config))
