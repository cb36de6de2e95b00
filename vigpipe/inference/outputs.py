"""What a model of a weights file makes of images or of the nodes of a graph, on ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import InferenceConfig
from vigpipe.data import Source
from vigpipe.data.job import ImageJob
from vigpipe.data.stored import Look, StoredImages
from vigpipe.errors import InputError
from vigpipe.graphs.job import GraphJob, make_graph_job
from vigpipe.graphs.samplers.surroundings import cut_to
from vigpipe.inference.description import ModelDescription, matching_weights
from vigpipe.inference.graph_description import GraphDescription
from vigpipe.inference.nodes import find_nodes, nodes_in
from vigpipe.inference.prepack import can_prepack, prepack
from vigpipe.launch.device import weight_dtype
from vigpipe.model.gnn.model import GraphModel
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState


class Output(NamedTuple):
    """What a model makes of some samples, on the host, in their order."""

    logits: Tensor  # (b, C), float32 or float64
    features: Tensor | None  # (b, d), what the last layers classify; None if nobody wants it


def prepare_images(
    config: InferenceConfig,
    description: ModelDescription,
    images: StoredImages,
    look: Look | None = None,
) -> Run:
    """Prepare a run whose test images are given ones, of the model's channels."""
    if not len(images):
        raise InputError("none of the images can be read; name others")
    split, names = description.split(images, look), description.names()
    source = Source(
        "image files", names, description.in_chans, description.image_size, split, split
    )
    options = TrainConfig(
        model=description.model,  # pyrefly: ignore[bad-argument-type]
        **description.options,
        data="fake",  # a placeholder, because the checks of the options need images
        image_size=f"{description.image_size[0]}x{description.image_size[1]}",
        batch_size=config.batch_size,
        sync="drain",  # the smallest buffers; there are no gradients
        **_options_of_ranks(config),
    )
    run = prepare(options, weight_dtype(config.dtype))
    matching_weights(config.weights, description.build)
    options = replace(run.config, weights=config.weights)
    notes = tuple(note for note in run.notes if note not in run.job.notes)  # not of the placeholder
    return replace(run, job=ImageJob(options, source), config=options, notes=notes)


def prepare_graph(
    config: InferenceConfig, description: GraphDescription, data: str, nodes: str | None = None
) -> Run:
    """Prepare a run that scores all nodes of a graph at once.

    With --nodes, the graph has those first, and what the model needs for them.
    """

    def opened(options: TrainConfig) -> GraphJob:
        graph = description.open(data, config.data_dir, config.seed, download=config.download)
        if nodes is not None:
            chosen = find_nodes(nodes_in(nodes), graph, "--nodes", data)
            graph = cut_to(graph, chosen, description.options["layers"])
        return make_graph_job(options, graph)

    options = TrainConfig(
        weights=config.weights,  # which say what the model is
        data=data,
        data_dir=config.data_dir,
        download=config.download,
        sampler="full",
        seed=config.seed,
        multi_label=description.multi_label,
        **_options_of_ranks(config),
    )
    return prepare(options, weight_dtype(config.dtype), opened=opened)


def _options_of_ranks(config: InferenceConfig) -> dict[str, Any]:
    """Return the options of `vigpipe train` that say how the ranks compute."""
    names = ("stages", "microbatches", "dp", "schedule", "virtual_stages")
    names += ("device", "dtype", "threads", "timeout")
    return {name: getattr(config, name) for name in names}


def outputs_of_images(rank_state: RankState, *, has_features: bool = False) -> Iterator[Output]:
    """Yield what the model makes of each batch of `prepare_images`, on ranks of the last stage.

    Every rank must exhaust the iterator. On a CPU the models are prepacked, so that nothing else
    can be done with them afterwards.
    """
    run, pipeline = rank_state.run, rank_state.pipeline
    job, dtype = run.job, run.autocast_dtype or run.dtype
    assert isinstance(job, ImageJob)
    taken: list[Tensor] = []  # what the readout has pooled, micro-batch by micro-batch
    for model in rank_state.trained.models:
        if can_prepack(model, dtype):
            prepack(model, dtype)
        if has_features and model.has_readout:
            _listen(model.get_submodule(model.pooled_into), taken)
    scorers = rank_state.scorers
    for batch in rank_state.feed.test_batches(("test",), scorers.size, scorers.rank):
        logits = pipeline.logits(batch)
        if logits is None:
            continue
        parts = [logits]
        if has_features:
            parts.append(_padded(taken, batch.sizes, len(logits) // len(batch.sizes)))
            taken.clear()
        widths = [part.shape[1] for part in parts]
        rows = torch.cat([_at_least_float32(part) for part in parts], 1)  # (M * b, C + d)
        of_all = rank_state.reducer.gather(rows.flatten()).unflatten(1, rows.shape).cpu()
        real = [
            of_replica[job.share(run.layout, index).positions(batch.num_samples) >= 0]
            for index, of_replica in enumerate(of_all)
        ]
        yield Output(*torch.cat(real).split(widths, 1), *([] if has_features else [None]))


def output_of_nodes(rank_state: RankState, *, has_features: bool = False) -> Output | None:
    """Return what the model makes of all nodes of `prepare_graph`, on ranks of the last stage."""
    assert isinstance(rank_state.run.job, GraphJob)
    taken: list[Any] = []
    for model in rank_state.trained.models:
        assert isinstance(model, GraphModel)
        if has_features:
            model.listener = taken.append
    scorers = rank_state.scorers
    (batch,) = rank_state.feed.test_batches(("test",), scorers.size, scorers.rank)
    logits = rank_state.pipeline.logits(batch)
    if logits is None:
        return None
    features = _at_least_float32(taken[0]).cpu() if taken else None
    return Output(_at_least_float32(logits).cpu(), features)


def check_has_features(config: InferenceConfig, description: GraphDescription) -> None:
    """Raise InputError for a model of a graph whose last layer takes what the graph itself has."""
    if description.options["layers"] == 1 and description.model != "gcn2":
        raise InputError(
            f"--embeddings: {config.weights} has one layer, which takes the features of the graph "
            "themselves; leave it out"
        )


def _listen(module: nn.Module, taken: list[Tensor]) -> None:
    module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))


def _padded(taken: list[Tensor], sizes: Sequence[int], microbatch_size: int) -> Tensor:
    """Put the rows of micro-batches where their logits are, (M * b, d); empty ones were not run."""
    rows = taken[0].new_zeros(len(sizes), microbatch_size, taken[0].shape[1])
    not_empty = [index for index, size in enumerate(sizes) if size]
    for index, of_microbatch in zip(not_empty, taken, strict=True):
        rows[index, : sizes[index]] = of_microbatch
    return rows.flatten(0, 1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
