"""Decide the facts of a run, and check them together before any process group exists."""

import hashlib
import json
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from vigpipe.config.options import (
    MODEL_DEFAULTS,
    TrainConfig,
    check_numbers,
    parse_image_size,
    uses_timm,
    with_model_defaults,
)
from vigpipe.config.replication import with_replication_defaults
from vigpipe.data import Augmentation, Source, open_source
from vigpipe.data.batches import Share, num_steps
from vigpipe.data.stored import ImageId
from vigpipe.errors import InputError
from vigpipe.model.blocks import FewNodesWarning
from vigpipe.model.staged import StagedModel
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.model.weights import load_weights, match_state, read_weights, to_reference_names
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan, even_plan, read_plan
from vigpipe.replication.course import Course
from vigpipe.replication.feedback import notes_on_compression
from vigpipe.run.trackers import check_tracker


@dataclass(frozen=True)
class Run:
    """The facts of a run, decided and checked.

    Attributes:
        config: all options, with the defaults of the model filled in.
        source: the images and their labels.
        layout: the degrees of parallelism.
        plan: which block goes to which stage.
        parameter_order: index of every parameter in the unsplit model, by name.
        dtype: dtype of the weights.
        notes: sentences that the user should read before the run.
    """

    config: TrainConfig
    source: Source
    layout: Layout
    plan: Plan
    parameter_order: dict[str, int]
    dtype: torch.dtype
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """B, the number of samples of one optimizer step over all replicas."""
        assert self.config.batch_size is not None
        return self.config.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps that visit every training image once."""
        return num_steps(len(self.source.train), self.batch_size)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None
        return self.config.epochs * self.steps_per_epoch

    @property
    def course(self) -> Course:
        """The steps of the run as plain numbers."""
        every = self.config.evaluate_every
        return Course(self.num_steps, self.steps_per_epoch, every, self.layout.num_replicas)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of an image, (C, H, W)."""
        return (self.source.channels, *self.source.image_size)

    def share(self, replica_index: int) -> Share:
        """Return one replica's share of a batch, and how it is cut into micro-batches."""
        layout = self.layout
        return Share(self.batch_size, layout.num_microbatches, layout.num_replicas, replica_index)

    @property
    def num_recomputed(self) -> int:
        """Number of micro-batches, from the first of a step, whose forward is computed twice."""
        num_microbatches = self.layout.num_microbatches
        by_option = {"never": 0, "except-last": num_microbatches - 1, "always": num_microbatches}
        return by_option[self.config.recompute]

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Dtype of the features and gradients that pass from stage to stage."""
        return torch.bfloat16 if self.config.boundary == "bfloat16" else self.dtype

    @property
    def lowered_dtype(self) -> torch.dtype | None:
        """Dtype of the matrix products; None for that of the weights."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.config.dtype)

    def build(self) -> StagedModel:
        """Build the unsplit model, with weights from the seed or from the file of --weights."""
        torch.manual_seed(self.config.seed)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FewNodesWarning
            )  # the warning is already among the notes
            model = _make(self.config, self.source)()
        if self.config.weights is not None:
            load_weights(model, self.config.weights, new_classifier=self.config.new_classifier)
        model.set_detect_anomaly(self.config.detect_anomaly)
        return model.to(self.dtype)

    def rates(self) -> dict[str, tuple[float, float]]:
        """Return the rate scale and the weight decay of every parameter of the unsplit model.

        timm groups the parameters: biases, norms and those in `no_weight_decay` do not decay, and
        --layer-decay multiplies the learning rate by that factor for every layer before the last.

        Returns:
            The factor of the learning rate and the weight decay, by the parameter's name.
        """
        from timm.optim import (
            param_groups_layer_decay,  # pyright: ignore[reportPrivateImportUsage]
        )

        assert self.config.weight_decay is not None
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FewNodesWarning)
            model = _make(self.config, self.source)()
        groups = param_groups_layer_decay(
            model,
            self.config.weight_decay,
            no_weight_decay_list=model.no_weight_decay(),
            layer_decay=self.config.layer_decay,
        )
        rates = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
        return {name: rates[id(p)] for name, p in model.named_parameters()}

    def tensor_names(self) -> frozenset[str]:
        """Return the names in the state dict of the unsplit model."""
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FewNodesWarning)
            return frozenset(_make(self.config, self.source)().state_dict())

    @cached_property
    def fingerprint(self) -> dict[str, object]:
        """Numbers that identify the labelled images, whatever folder they are in."""
        source = self.source
        digest = hashlib.sha256("\0".join(source.class_names).encode())
        for split in source.splits:
            digest.update(split.labels.tobytes())
        numbers = {"training images": len(source.train), "test images": len(source.test)}
        if source.validation is not None:
            numbers["validation images"] = len(source.validation)
        return {**numbers, "SHA-256 of the labels": digest.hexdigest()}

    def weights_metadata(self) -> dict[str, str]:
        """Return the metadata of this run's weights file: the model, and the look of its images."""
        config, source, pixels = self.config, self.source, MODEL_DEFAULTS[self.config.model]
        height, width = source.image_size
        metadata = {
            "model": config.model,
            "num_classes": source.num_classes,
            "in_chans": source.channels,
            "img_size": f"{height}x{width}",
            "mean": pixels.image_mean,
            "std": pixels.image_std,
            "crop_pct": config.crop_pct,
            "class_names": json.dumps(source.class_names, ensure_ascii=False),
            "norm": config.norm,
            "graph": config.graph,
            "aggregator": config.aggregator,
            "stem_stride": config.stem_stride,
            "compat": config.compat,
        }
        return {name: str(value) for name, value in metadata.items() if value is not None}

    def unsplit(self) -> "Run":
        """Return the reference run: one process, the same D x M micro-batches in the same order."""
        total_microbatches = self.layout.num_replicas * self.layout.num_microbatches
        layout = Layout(num_microbatches=total_microbatches)
        all_blocks = tuple(block for stage in self.plan.stages for block in stage)
        return replace(self, layout=layout, plan=Plan((all_blocks,)))


def prepare(
    config: TrainConfig,
    dtype: torch.dtype,
    bad_images: frozenset[ImageId] = frozenset(),
    ranks_on_host: int | None = None,
    num_hosts: int | None = None,
) -> Run:
    """Decide the facts of a run from its options, and check them together.

    Args:
        config: the options as the user gave them.
        dtype: dtype of the weights.
        bad_images: images to leave out.
        ranks_on_host: how many ranks share a host; None if all of them do.
        num_hosts: instead, how many hosts a run had that is done again here.

    Raises:
        InputError: an option is unknown, missing or out of range, or options contradict one
            another, the data or the model.
    """
    check_numbers(config)
    check_tracker(config.track)
    config = with_replication_defaults(with_model_defaults(config))
    defaults = MODEL_DEFAULTS[config.model]
    assert config.batch_size is not None

    source = open_source(
        config.data,
        data_dir=config.data_dir,
        download=config.download,
        image_size=parse_image_size(config.image_size),
        mean=defaults.image_mean,
        std=defaults.image_std,
        crop_pct=config.crop_pct or 1.0,
        augment=_augment(config),
        seed=config.seed,
        validation=config.validation,
        skip_bad_images=config.skip_bad_images,
        bad_images=bad_images,
    )
    with torch.device("meta"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FewNodesWarning)
        model = _make(config, source)()
    if config.weights is not None:
        state = to_reference_names(read_weights(config.weights))
        match_state(state, model, str(config.weights), new_classifier=config.new_classifier)
    num_blocks = len(model.numbered_blocks)

    virtual_stages = config.virtual_stages
    if isinstance(config.stages, Path):
        plan = read_plan(config.stages, config.model, num_blocks)
        if virtual_stages < 1 or plan.num_stages % virtual_stages:
            raise InputError(
                f"{config.stages}: {plan.num_stages} stages cannot be shared by ranks of "
                f"--virtual-stages {virtual_stages} each; change the plan or the option"
            )
        pipeline_size = plan.num_stages // virtual_stages
    else:
        assert config.stages != "auto", "start.run_on_ranks decides how many"
        plan, pipeline_size = None, config.stages
    layout = Layout(
        pipeline_size,
        config.microbatches,
        config.dp,
        config.schedule,
        virtual_stages,
        has_server=config.strategy == "server",
    )
    if num_hosts is not None and layout.world_size % num_hosts == 0:
        ranks_on_host = layout.world_size // num_hosts
    layout = replace(layout, num_teams=_num_teams(config, layout, ranks_on_host))
    plan = plan or even_plan(num_blocks, pipeline_size * virtual_stages)

    if config.compile and config.recompute != "never":
        raise InputError(
            f"--compile with --recompute {config.recompute}: a compiled block cannot tell a "
            "repetition from a first run, and BatchNorm would count twice; leave one out"
        )
    if config.boundary == "bfloat16":
        _check_boundaries(model, plan)
    total_microbatches = layout.num_microbatches * layout.num_replicas
    assert config.batch_size is not None
    fewest = min(config.batch_size, len(source.train))
    if total_microbatches > fewest:
        raise InputError(
            f"--microbatches {layout.num_microbatches} x --dp {layout.num_replicas} cuts a batch "
            f"into {total_microbatches} micro-batches, but a batch has {fewest} samples "
            f"(--batch-size {config.batch_size}, {len(source.train)} training images); choose "
            "fewer micro-batches or a larger batch"
        )
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    notes = [str(warning.message) for warning in caught]
    if config.average is not None and layout.num_teams == 1:
        what = "replica" if layout.num_replicas == 1 else "host"
        notes.append(f"--strategy {config.strategy}: there is one {what}, so nothing is averaged")
    if config.compress != "none":
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        notes += notes_on_compression(config, shapes, dtype.itemsize, layout.num_teams)
    if source.validation is not None:
        num_held_out, num_left = len(source.validation), len(source.train)
        notes.append(
            f"{num_held_out} of {num_held_out + num_left} training images are held out for "
            "validation"
        )
    return Run(config, source, layout, plan, order, dtype, tuple(notes))


def _num_teams(config: TrainConfig, layout: Layout, ranks_on_host: int | None) -> int:
    """Return how many teams the replicas form, each of those that take every step together.

    Raises:
        InputError: --gossip-between hosts with replicas that are spread over hosts.
    """
    if config.strategy == "synchronous":
        return 1
    if config.gossip_between != "hosts":
        return layout.num_replicas
    on_host = layout.world_size if ranks_on_host is None else ranks_on_host
    if on_host % layout.pipeline_size or layout.world_size % on_host:
        raise InputError(
            f"--gossip-between hosts: expected the same number of whole replicas on every host, "
            f"and a host has {on_host} of {layout.world_size} ranks, with --stages "
            f"{layout.pipeline_size}; start a multiple of {layout.pipeline_size} ranks on each"
        )
    num_teams = layout.world_size // on_host
    if config.pairs == "sets" and num_teams % 2:
        raise InputError(
            f"--pairs sets: even hosts draw odd ones, so their number must be even, and there are "
            f"{num_teams}; choose --pairs any"
        )
    return num_teams


def _check_boundaries(model: StagedModel, plan: Plan) -> None:
    """Raise InputError if a graph would cross a boundary: bfloat16 holds indices only up to 256."""
    if not isinstance(model, VisionGnn):
        return
    for stage in plan.stages[1:]:
        if model.specs[stage[0]].num_given:
            raise InputError(
                f"--boundary bfloat16: block {stage[0]} takes the graph of the block before it, in "
                "another stage, whose indices bfloat16 would round; cut elsewhere, or choose a "
                "--graph without reuse and lookahead, or --boundary full"
            )


def _augment(config: TrainConfig) -> bool | Augmentation:
    if not uses_timm(config):
        return bool(config.augment)
    return Augmentation(
        config.random_crop or "box",
        config.auto_augment or "none",
        config.color_jitter or 0.0,
        config.erasing or 0.0,
    )


def _make(config: TrainConfig, source: Source) -> "partial[StagedModel]":
    return partial(
        create_model,
        config.model,
        num_classes=source.num_classes,
        in_chans=source.channels,
        img_size=source.image_size,
        norm=config.norm,
        drop_path_rate=config.drop_path or 0.0,
        drop_rate=config.dropout,
        graph=config.graph,
        aggregator=config.aggregator,
        stochastic_dilation=config.stochastic_dilation,
        stem_stride=config.stem_stride,
        compat=config.compat,
        impl=config.impl,
    )
