"""The commands `vigpipe predict` and `evaluate`, up to what needs torch, which `inference` does."""

import os
from collections.abc import Sequence
from pathlib import Path

from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.config.options import TrainConfig, as_given, check_numbers, flag, given
from vigpipe.config.verbs import (
    MADE_BY_EVALUATE,
    MADE_BY_EXPLAIN,
    PICTURES,
    EvaluateConfig,
    ExplainConfig,
    InferenceConfig,
    PredictConfig,
)
from vigpipe.errors import DONE, InputError
from vigpipe.files.outputs import check_new_file
from vigpipe.files.weights_metadata import metadata_if_any
from vigpipe.launch.environment import from_environment
from vigpipe.launch.failures import Advice, run_rank
from vigpipe.launch.local import preload
from vigpipe.parallel.layout import Layout
from vigpipe.start import COMMAND_LINE, SKIP

OF_IMAGES = ("model", "image_size", "skip_bad_images", "batch_size", "microbatches", "dp")
OF_GRAPHS = ("data_dir", "download", "split", "nodes", "seed")
_CHECKED = ("seed", "image_size", "batch_size", "threads", "timeout")  # as those of train


def run_inference(
    config: InferenceConfig, arguments: Sequence[str], images: Sequence[Path] = ()
) -> int | None:
    """Run `vigpipe predict`, on files and folders, or `evaluate`, with ranks as for training.

    Return the exit code; None if the result is what this process has printed.
    """
    launch = from_environment(os.environ)
    is_graph = False

    def run() -> int:
        nonlocal is_graph
        is_graph = _check(config, images)
        if launch.launcher == "alone" and (config.stages != 1 or config.dp > 1):
            preload(COMMAND_LINE, "vigpipe.commands.inference")
        from vigpipe.commands.inference import start_or_infer  # imports torch

        return start_or_infer(config, images, arguments, launch, is_graph=is_graph)

    def advice() -> Advice:
        if is_graph:  # all nodes at once
            return Advice()
        memory = "take a smaller --batch-size, more --microbatches, or more memory"
        return Advice(memory, None if config.skip_bad_images else SKIP)

    code = run_rank(run, launch, advice=advice)
    # A code other than 0 of one of several ranks would end the others before they are done.
    return None if code == DONE and launch.world_size == 1 else code


def _check(config: InferenceConfig, images: Sequence[Path]) -> bool:
    """Return whether the model is one of a graph; raise InputError for what is wrong by itself."""
    named = metadata_if_any(config.weights).get("model")
    is_graph = named in GRAPH_MODELS
    others: Sequence[str] = ()
    if isinstance(config, PredictConfig):
        if config.data is None:
            _check_of_images(config.weights, named)
        is_graph = config.data is not None
        if images and is_graph:
            raise InputError(
                f"{images[0]}: is an image or a folder of images, and --data {config.data} a "
                "graph; leave one of the two out"
            )
        others = () if is_graph else OF_GRAPHS
    advice = "is for the nodes of a graph; leave it out, or name the graph with --data"
    if is_graph:
        others = OF_IMAGES
        advice = "is for images, and the nodes of a graph are computed all at once; leave it out"
    for name, value in given(config, others, type(config)).items():
        raise InputError(f"{as_given(name, value)}: {advice}")
    if isinstance(config, PredictConfig):
        if config.nodes is not None and config.split != "all":
            raise InputError(
                f"--nodes {config.nodes}: chooses the nodes that are told, as --split "
                f"{config.split} does; leave one of the two out"
            )
        if config.logits and config.logits == config.embeddings:
            path = config.embeddings
            raise InputError(f"--embeddings {path}: is --logits, too; name another file")
        for name in ("logits", "embeddings"):
            if (path := getattr(config, name)) is not None:
                check_new_file(path, f"{flag(name)} ", (".npz",), overwrite=None)
    if isinstance(config, EvaluateConfig):
        if is_graph and config.test:
            raise InputError(
                f"--test {config.test}: holds images out, and a graph has test nodes of its own; "
                "leave it out"
            )
        if not is_graph and config.seed and not config.test:
            raise InputError(f"--seed {config.seed}: is that of --test; name it, too, or neither")
        if config.page is not None:
            endings = (".html", ".htm")
            check_new_file(config.page, "--page ", endings, mark=MADE_BY_EVALUATE, overwrite=None)
    checked = {name: getattr(config, name) for name in _CHECKED}
    check_numbers(TrainConfig(**checked, test=getattr(config, "test", 0.0)))
    if isinstance(config.stages, int):  # otherwise a plan says how many
        Layout(
            config.stages, config.microbatches, config.dp, config.schedule, config.virtual_stages
        )
    return is_graph


def check_explained(config: ExplainConfig) -> None:
    """Raise InputError for what is wrong by itself with the options of `vigpipe explain`."""
    if (config.image is None) == (config.data is None):
        what = "neither" if config.image is None else "both"
        raise InputError(f"--image, --data: {what} given; name an image, or a graph and its --node")
    if config.data is None:
        _check_of_images(config.weights, metadata_if_any(config.weights).get("model"))
    elif config.node is None:
        raise InputError(
            f"--node: is missing beside --data {config.data}; give the name or the number of the "
            "node to explain"
        )
    others: Sequence[str] = ("model", "image_size")
    advice = "is for an image, and a graph's model is that of the weights"
    if config.data is None:
        others, advice = ("node", "data_dir", "download", "seed"), "is for the node of a graph"
    for name, value in given(config, others, ExplainConfig).items():
        raise InputError(f"{as_given(name, value)}: {advice}; leave it out")
    check_numbers(TrainConfig(seed=config.seed, image_size=config.image_size))
    if config.most < 1:
        raise InputError(f"--most {config.most}: must be at least 1")
    check_new_file(config.out, "--out ", PICTURES, mark=MADE_BY_EXPLAIN, overwrite=None)
    if config.arrays is not None:
        check_new_file(config.arrays, "--arrays ", (".npz",), overwrite=None)


def _check_of_images(weights: Path, model: str | None) -> None:
    """Raise InputError if a file's metadata name a model of a graph."""
    if model in GRAPH_MODELS:
        raise InputError(
            f"--weights {weights}: holds a {model}, which is a model of a graph, not of images; "
            "name the graph with --data"
        )
