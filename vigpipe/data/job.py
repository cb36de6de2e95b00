"""A run that trains on labelled images: what the trainer asks of it (`vigpipe.job.job.Job`)."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from vigpipe.config.choices import MOBILE_MODELS, Norm
from vigpipe.config.of_weights import options_in_weights
from vigpipe.config.options import TrainConfig, parse_image_size, uses_timm
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.data.augment import Augmentation
from vigpipe.data.batches import Share, num_steps
from vigpipe.data.feed import ImageFeed
from vigpipe.data.left_out import counted, unreadable
from vigpipe.data.loss import Loss
from vigpipe.data.merged import MergedImageModel
from vigpipe.data.mix import Mix
from vigpipe.data.score import ImageTally
from vigpipe.data.sources import Source, open_source
from vigpipe.data.stored import ImageId
from vigpipe.data.tokens import SplitTokens
from vigpipe.errors import InputError
from vigpipe.files.names import MOST_NAMED, first_few
from vigpipe.files.weights_metadata import channels_text, per_channel
from vigpipe.job.class_weights import class_weights, digest_of_weights
from vigpipe.job.feed import Needs
from vigpipe.job.job import TrialStep
from vigpipe.job.rows import Fill, partial_batch
from vigpipe.messages import plural
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.slicing import Slicing
from vigpipe.model.staged import StagedModel
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.parallel.layout import Layout
from vigpipe.parallel.plan import Plan
from vigpipe.parallel.schedule import Pipeline
from vigpipe.parallel.shards import Shards


@dataclass(frozen=True)
class ImageJob:
    """Labelled images, and the model that is trained on them; see `vigpipe.job.job.Job`."""

    unit: ClassVar[str] = "images"
    merges_whole: ClassVar[bool] = True

    config: TrainConfig  # The defaults of the model are filled in.
    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    def with_options(self, config: TrainConfig) -> "ImageJob":
        return replace(self, config=config)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @property
    def passes(self) -> tuple[tuple[str, ...], ...]:
        return (("test",),) if self.source.validation is None else (("test",), ("validation",))

    @property
    def description(self) -> str:
        source = self.source
        validation = ""
        if source.validation is not None and not self.config.validation:
            validation = f", {len(source.validation):,} validation"
        return (
            f"{len(source.train):,} training{validation} and {len(source.test):,} test images in "
            f"{source.num_classes:,} classes ({first_few(source.class_names)})"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        source, notes = self.source, list[str]()
        for what, split in (("training", source.train), ("test", source.test)):
            has_some = np.isin(np.arange(source.num_classes), split.labels)
            if not has_some.all():
                absent = [source.class_names[label] for label in np.flatnonzero(~has_some)]
                notes.append(f"without {what} images: {counted(absent, 'class', 'classes')}")
        if source.stored is not None:
            notes += source.stored.notes
        if source.bad_images:
            notes.append(unreadable(source.bad_images))
        if self.config.compat and self.config.model in MOBILE_MODELS:
            notes.append("--compat reference: a layer before the readout is random, not learned")
        num_images = len(source.train)
        if self.config.validation and source.validation is not None:
            num_images += len(source.validation)
            notes.append(
                f"{len(source.validation)} of {num_images} training images are held out for "
                "validation"
            )
        if self.config.test:
            of = f"{len(source.test)} of {num_images + len(source.test)}"
            notes.append(f"{of} images are held out for the test")
        return tuple(notes)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        return (self.source.channels, *self.source.image_size)

    def make_model(self, num_parts: int = 1) -> StagedModel:
        config, source = self.config, self.source
        return create_model(
            config.model,
            num_classes=source.num_classes,
            in_chans=source.channels,
            img_size=source.image_size,
            norm=cast(Norm, config.norm),
            drop_path_rate=config.drop_path or 0.0,
            drop_rate=config.dropout,
            graph=config.graph,
            aggregator=config.aggregator,
            stochastic_dilation=config.stochastic_dilation,
            stem_stride=config.stem_stride,
            compat=config.compat,
            dist_head=config.dist_head,
            impl=config.impl,
            narrow=num_parts,
            divided=config.divided or "inner",
            branch_rescale=config.branch_rescale,
        )

    def check(self, layout: Layout, model: StagedModel, plan: Plan) -> None:
        _ = self._class_weights  # it raises
        if self.config.boundary == "bfloat16":
            _check_boundaries(model, plan)
        if layout.num_shards > 1:
            _check_shards(self.config, layout.num_shards, model)
        total_microbatches = layout.num_microbatches * layout.num_replicas
        num_images, batch_size = len(self.source.train), self.batch_size(layout)
        fewest = self.most_microbatches(layout)
        if total_microbatches > fewest:
            raise InputError(
                f"--microbatches {layout.num_microbatches} x --dp {layout.num_replicas} cuts a "
                f"batch into {total_microbatches} micro-batches, but a batch has {fewest} samples "
                f"(--batch-size {batch_size}, {num_images} training images); choose fewer "
                "micro-batches or a larger batch"
            )

    def share(self, layout: Layout, replica_index: int) -> Share:
        return Share(
            self.batch_size(layout), layout.num_microbatches, layout.num_replicas, replica_index
        )

    def batch_size(self, layout: Layout) -> int:
        assert self.config.batch_size is not None
        return self.config.batch_size

    def microbatch_size(self, layout: Layout) -> int:
        return self.share(layout, 0).microbatch_size

    def rows_before(self, layout: Layout, block: int) -> int:
        return self.microbatch_size(layout)  # All of them reach every block.

    def most_microbatches(self, layout: Layout) -> int:
        return min(self.batch_size(layout), len(self.source.train))

    def trials(self, microbatch_sizes: Sequence[int], most: int) -> list[TrialStep]:
        steps: list[TrialStep] = []
        for size in microbatch_sizes:
            num_microbatches = max(1, min(most, len(self.source.train) // size))
            config = replace(self.config, batch_size=size * num_microbatches)
            steps.append(TrialStep(config, num_microbatches, 0, {self.unit: size}))
        return steps

    typical_microbatch = None

    def describe_step(self, layout: Layout) -> str:
        return plural(min(self.batch_size(layout), len(self.source.train)), "image")

    def steps_per_epoch(self, layout: Layout) -> int:
        return num_steps(len(self.source.train), self.batch_size(layout))

    def fill(self, layout: Layout, item: int) -> Fill:
        step, replica = divmod(item, layout.num_replicas)
        batch_size = self.batch_size(layout)
        before = step % self.steps_per_epoch(layout) * batch_size
        num_samples = min(batch_size, len(self.source.train) - before)
        share = self.share(layout, replica)
        return Fill(*(share.of_team(n, layout.team_size) for n in (num_samples, batch_size)))

    def fill_of_test(self, layout: Layout, num_pipelines: int, num_samples: int) -> Fill:
        return Fill(num_samples, self.share(layout, 0).among(num_pipelines).batch_size)

    def why_not_recorded(self, layout: Layout) -> str | None:
        num_microbatches = layout.num_microbatches * layout.num_replicas
        batch_size = self.batch_size(layout)
        if batch_size % num_microbatches == 0:
            return None
        return (
            f"a graph has one size of micro-batches, and {batch_size} samples make "
            f"{num_microbatches} of unequal size"
        )

    def loss(self, factor: Tensor | None) -> Loss:
        return Loss(factor, self._class_weights)

    @cached_property
    def _class_weights(self) -> Tensor | None:
        option = self.config.class_weights
        if option is None:
            return None
        counts = np.bincount(self.source.train.labels, minlength=self.source.num_classes)
        return class_weights(option, self.class_names, counts)

    def feed(self, needs: Needs) -> ImageFeed:
        config, shards = self.config, needs.shards
        return ImageFeed(
            self.source,
            self.share(needs.layout, needs.replica_index),
            needs.device,
            with_images=needs.has_first,
            with_labels=needs.has_last,
            team_size=needs.layout.team_size,
            dtype=needs.dtype,
            seed=config.seed,
            times=config.repeated_augment or 1,
            mix=self._mix(),
            num_workers=config.workers,
            hang_seconds=config.timeout,
            # Ranks that share images all read them, and the first of them has the labels.
            counts=shards is None or shards.rank == 0,
        )

    def share_models(self, models: Sequence[StagedModel], shards: Shards) -> None:
        tokens = SplitTokens(shards)
        for model in models:
            assert isinstance(model, VisionGnn)  # `check` has refused others
            model.share_tokens(tokens)

    def _mix(self) -> Mix | None:
        config, source = self.config, self.source
        rates = config.mixup or 0.0, config.cutmix or 0.0, config.smoothing or 0.0
        if not any(rates):
            return None
        return Mix(*rates, source.num_classes, source.image_size, config.seed)

    def merged(
        self, stages: Sequence[StagedModel], share: WideShare, pipeline: Pipeline
    ) -> MergedImageModel:
        return MergedImageModel(stages, share, pipeline)

    def slicing(self, model: StagedModel) -> Slicing:
        if isinstance(model, VisionGnn):
            return model.slicing(divided=self.config.divided or "inner")
        return model.slicing()

    def tally(self, splits: Sequence[str], device: torch.device) -> ImageTally:
        return ImageTally(splits, device, self.source.num_classes)

    def num_rows(self, layout: Layout, item: int, num_samples: int) -> int:
        return num_samples

    def rates(
        self, layout: Layout, item: int, num_samples: int, seconds: float
    ) -> dict[str, float]:
        return {
            "images_per_second": num_samples / seconds,
            **partial_batch(self.fill(layout, item)),
        }

    @property
    def fingerprint(self) -> dict[str, object]:
        source = self.source
        digest = hashlib.sha256("\0".join(source.class_names).encode())
        for split in source.splits:
            digest.update(split.labels.tobytes())
        numbers = {"training images": len(source.train), "test images": len(source.test)}
        if source.validation is not None:
            numbers["validation images"] = len(source.validation)
        marks = hashlib.sha256()
        for images in () if source.stored is None else source.stored.splits.values():
            for mark in images.load.marks():
                marks.update(mark)
        return {
            **numbers,
            "SHA-256 of the labels": digest.hexdigest(),
            "SHA-256 of the images' names and sizes": marks.hexdigest(),
            **digest_of_weights(self._class_weights),
        }

    def cost_options(self) -> dict[str, str]:
        shape = "x".join(map(str, self.row_shape))
        return {"images": shape, "classes": str(self.source.num_classes)}

    def weights_metadata(self) -> dict[str, object]:
        config, source, pixels = self.config, self.source, MODEL_DEFAULTS[self.config.model]
        height, width = source.image_size
        return {
            "num_classes": source.num_classes,
            "in_chans": source.channels,
            "img_size": f"{height}x{width}",
            "mean": channels_text(per_channel(pixels.image_mean, source.channels)),
            "std": channels_text(per_channel(pixels.image_std, source.channels)),
            "crop_pct": config.crop_pct,
            "class_names": json.dumps(source.class_names, ensure_ascii=False),
            **options_in_weights(config),
        }

    def summary(self) -> dict[str, object]:
        bad = self.source.bad_images
        return {"skipped_images": len(bad), "skipped_image_names": list(bad[:MOST_NAMED])}


def open_images(config: TrainConfig, bad_images: frozenset[ImageId] = frozenset()) -> ImageJob:
    """Open the images that the options, with the model's defaults, name, but for the bad ones."""
    defaults = MODEL_DEFAULTS[config.model]
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
        test=config.test,
        exif=bool(config.exif),
        skip_bad_images=config.skip_bad_images,
        bad_images=bad_images,
    )
    return ImageJob(config, source)


def _augment(config: TrainConfig) -> bool | Augmentation:
    if not uses_timm(config):
        return bool(config.augment)
    return Augmentation(
        config.random_crop or "box",
        config.auto_augment or "none",
        config.color_jitter or 0.0,
        config.erasing or 0.0,
    )


def _check_shards(config: TrainConfig, num_shards: int, model: StagedModel) -> None:
    what = f"--shards {num_shards}"
    if not isinstance(model, VisionGnn):
        raise InputError(
            f"{what}: lets ranks share the nodes of a ViG, and {config.model} is none; leave it "
            "out, or choose another --model"
        )
    for option, is_given in (
        ("--compile", config.compile),
        ("--detect-anomaly", config.detect_anomaly),
    ):
        if is_given:
            raise InputError(
                f"{option} with {what}: looks into blocks that wait for other ranks; leave one of "
                "the two out"
            )
    for spec in model.specs:
        fewest = min(spec.grid[0], spec.channels)
        if fewest < num_shards:
            raise InputError(
                f"{what}: each rank has some rows of nodes and some channels in turn, and a block "
                f"of {config.model} has {spec.grid[0]} rows and {spec.channels} channels; take "
                f"--shards {fewest} or fewer, or larger images"
            )


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
