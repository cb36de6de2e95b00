"""Open the job that a run's model is for; the only place that knows every kind of job."""

from vigpipe.config.options import TrainConfig
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.data.job import open_images
from vigpipe.data.stored import ImageId
from vigpipe.job.job import Job

LeftOut = frozenset[ImageId]


def open_job(config: TrainConfig, left_out: LeftOut = frozenset()) -> Job:
    """Open the data that the options name, for the kind of job that their model is for.

    Args:
        config: all options, with the defaults of the model filled in.
        left_out: parts of the data to leave out: images that cannot be read.

    Raises:
        InputError: there is no such data, or it does not fit the options.
    """
    if MODEL_DEFAULTS[config.model].job == "graph":
        # A second of SciPy and scikit-learn, which no run on images needs.
        from vigpipe.graphs.job import open_graph_job

        return open_graph_job(config)
    return open_images(config, left_out)
