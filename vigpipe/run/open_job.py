"""Open the job that a run's model is for; the only file that knows every kind of job.

It imports neither torch nor a job until one is opened.
"""

from typing import TYPE_CHECKING

from vigpipe.config.choices import JobName
from vigpipe.config.recipes import MODEL_DEFAULTS

if TYPE_CHECKING:
    from vigpipe.config.options import TrainConfig
    from vigpipe.data.stored import ImageId
    from vigpipe.job.job import Job

    LeftOut = frozenset[ImageId]

# What opening a job imports, so that ranks can be forked from a process that has it already.
MODULES: dict[JobName, str] = {"images": "vigpipe.data.job", "graph": "vigpipe.graphs.job"}


def open_job(config: "TrainConfig", left_out: "LeftOut" = frozenset()) -> "Job":
    """Open the job of options with a model's defaults; InputError if data are missing or unfit."""
    if MODEL_DEFAULTS[config.model].job == "graph":
        from vigpipe.graphs.job import open_graph_job  # It imports SciPy, which images do without.

        return open_graph_job(config)
    from vigpipe.data.job import open_images

    return open_images(config, left_out)
