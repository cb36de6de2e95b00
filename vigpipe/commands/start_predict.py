"""The command `vigpipe predict`, up to what needs torch, which `predict` does."""

import os
from collections.abc import Sequence
from pathlib import Path

from vigpipe.config.options import TrainConfig, as_given, check_numbers, given
from vigpipe.config.verbs import PredictConfig
from vigpipe.errors import DONE, InputError
from vigpipe.launch.environment import from_environment
from vigpipe.launch.failures import Advice, run_rank
from vigpipe.launch.local import preload
from vigpipe.parallel.layout import Layout
from vigpipe.start import COMMAND_LINE, SKIP

OF_IMAGES = ("model", "image_size", "skip_bad_images", "batch_size", "microbatches", "dp")
OF_GRAPHS = ("data_dir", "download", "split", "seed")
_CHECKED = ("seed", "image_size", "batch_size", "threads", "timeout")  # as those of train


def run_predict(
    config: PredictConfig, images: Sequence[Path], arguments: Sequence[str]
) -> int | None:
    """Run `vigpipe predict` on files and folders, with ranks as for training.

    Return the exit code; None if the result is what this process has printed.
    """
    launch = from_environment(os.environ)

    def run() -> int:
        _check(config, images)
        if launch.launcher == "alone" and (config.stages != 1 or config.dp > 1):
            preload(COMMAND_LINE, "vigpipe.commands.predict")
        from vigpipe.commands.predict import start_or_predict  # imports torch

        return start_or_predict(config, images, arguments, launch)

    advice = Advice()  # the nodes of a graph are predicted all at once
    if config.data is None:
        memory = "take a smaller --batch-size, more --microbatches, or more memory"
        advice = Advice(memory, None if config.skip_bad_images else SKIP)
    code = run_rank(run, launch, advice=lambda: advice)
    # A code other than 0 of one of several ranks would end the others before they are done.
    return None if code == DONE and launch.world_size == 1 else code


def _check(config: PredictConfig, images: Sequence[Path]) -> None:
    """Raise InputError for options that are wrong whatever the weights and the data are."""
    if config.data is None:
        others = OF_GRAPHS
        advice = "is for the nodes of a graph; leave it out, or name the graph with --data"
    else:
        if images:
            raise InputError(
                f"{images[0]}: is an image or a folder of images, and --data {config.data} a "
                "graph; leave one of the two out"
            )
        others = OF_IMAGES
        advice = "is for images, and the nodes of a graph are predicted all at once; leave it out"
    for name, value in given(config, others, PredictConfig).items():
        raise InputError(f"{as_given(name, value)}: {advice}")
    check_numbers(TrainConfig(**{name: getattr(config, name) for name in _CHECKED}))
    if isinstance(config.stages, int):  # otherwise a plan says how many
        Layout(
            config.stages, config.microbatches, config.dp, config.schedule, config.virtual_stages
        )
