"""Every option of a run: its meaning and its default, from flags and TOML files."""

import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from vigpipe.config.choices import (
    Boundary,
    Compat,
    Device,
    Dtype,
    Impl,
    LrSchedule,
    Model,
    Norm,
    OnNan,
    Optimizer,
    RandomCrop,
    Recipe,
    Recompute,
    Sync,
)
from vigpipe.config.recipes import MODEL_DEFAULTS, NO_RECIPE, RECIPES
from vigpipe.errors import InputError
from vigpipe.schedules import Schedule

SMALL_IMAGE = 32  # pixels; up to here a test image is not cut: every pixel counts
_LARGEST_SIDE = 1 << 14
_AUGMENTATION = ("random_crop", "auto_augment", "color_jitter", "erasing")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run; `None` stands for the recipe's value, else the model's.

    Attributes:
        config: TOML file of these options, as a run writes it; flags win over it.
        model: the model to train.
        weights: initial weights, as a run or the reference code writes them.
        new_classifier: start from the weights but for the last layer: other classes.
        graph: how the blocks find neighbours: knn, grid, window, pattern, reuse or lookahead, or a
            comma list of them, repeated over the blocks.
        aggregator: how a node sums its neighbours up: max, edge, sage, gin or maxmean, or a comma
            list, repeated over the blocks.
        stochastic_dilation: probability that a block in training takes random neighbours out of
            its k times dilation nearest.
        stem_stride: pixels of a node's side, where it is not the model's own.
        compat: reference keeps the quirks of the published code, for its weights.
        impl: fused operators where there are any (vigpipe doctor says which), or plain torch
            everywhere; for the same weights and, up to rounding, the same numbers.
        compile: run every block through torch.compile; it pays on GPUs, where it fuses what has no
            operator of ours.
        norm: normalisation layer; the result of layer and group does not depend on the
            micro-batches.
        drop_path: drop-path rate of the last block, rising linearly from 0 in the first.
        dropout: dropout rate in the readout.
        data: digits, cifar10, fake, or a folder with train/<class>/<image> and
            test/<class>/<image>.
        data_dir: folder of the CIFAR-10 files.
        download: fetch CIFAR-10 if it is not there.
        image_size: resize images to this square, or to HEIGHTxWIDTH.
        crop_pct: share of the side that is kept of a resized test image.
        recipe: augmentation and course of a whole training: imagenet is the published one, cifar
            one for small images.
        augment: cut and mirror training images at random.
        random_crop: how they are cut: a box of random size, or shift by up to an eighth.
        auto_augment: timm's random augmentation by its name, such as rand-m9-mstd0.5-inc1; none
            turns it off.
        color_jitter: random brightness, contrast and saturation; not with auto_augment.
        erasing: probability that a box of a training image is replaced by noise.
        mixup: alpha of mixup; 0 turns it off.
        cutmix: alpha of cutmix; 0 turns it off.
        smoothing: label smoothing.
        repeated_augment: times an image appears in a batch, augmented anew; 1 turns it off.
        workers: processes a rank that read and augment images ahead; 0 reads in the rank itself.
        skip_bad_images: leave out images that cannot be read, and count them.
        stages: ranks of one pipeline, or a plan file from stages/, or auto: all the ranks there
            are, or that this host has room for, cut by measured cost.
        microbatches: micro-batches each replica cuts its share of a batch into.
        dp: data-parallel replicas.
        schedule: order of forwards and backwards.
        virtual_stages: stages a rank, for interleaved1f1b and loopedbfs.
        sync: how gradients are added up over the replicas: after the pipeline has drained, in twice
            their precision (double) or their own (drain), or by DDP during the last backward.
        device: where to run; auto takes CUDA if there is a GPU.
        dtype: of weights and features; bfloat16 keeps float32 weights and lowers the matrix
            products.
        boundary: what crosses from stage to stage: as wide as the weights (full), or rounded to
            bfloat16, which halves the traffic; then the number of stages shows in the numbers.
        recompute: micro-batches whose features are computed again in the backward instead of kept.
        detect_anomaly: stop at the first block whose features are NaN or infinite.
        threads: threads a rank; else OMP_NUM_THREADS, else the host's cores divided by its ranks.
        timeout: seconds after which a rank that waits for a silent peer gives up; by default 60,
            and 600 where one rank works while others wait (check, plan, time, bench).
        opt: optimizer.
        lr: learning rate.
        weight_decay: weight decay, not applied to biases, norms and positional tables.
        layer_decay: factor by which the learning rate falls from every layer to the one before;
            each warms up to its own.
        lr_schedule: course of the learning rate after the warm-up.
        min_lr: learning rate at the end of the cosine.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: learning rate at the start of the warm-up.
        clip: largest norm of the gradient over all stages.
        ema: decay a step of the weights' moving average, which is scored too; 0 turns it off.
        batch_size: B, samples of one optimizer step over all replicas.
        epochs: passes over the training images.
        steps: optimizer steps; wins over epochs.
        checkpoint_every: steps between checkpoints (50), or time (10m, 2h), or never; asked to stop
            by SIGTERM or SIGUSR1, a run saves one always.
        keep: checkpoints that stay; the oldest goes when a newer one is whole.
        resume: go on from a checkpoint, or from a run's newest one that is whole; auto takes that
            of --out, and starts anew where there is none.
        max_restarts: times that ranks started here begin again by themselves, from the newest
            checkpoint, after one of them has died.
        elastic: take as many replicas, and where that is not enough as many stages, as there are
            ranks; a replica's micro-batches change so that the batch is cut as before.
        stop_before: save and stop that long before Slurm's time limit (5m), or at a moment
            (2026-11-22T06:00); exit code 75.
        on_nan: at a step whose loss or gradients are NaN or infinite, stop, or skip it.
        evaluate_every: epochs between evaluations; the last epoch ends in one always.
        timing: time steps, stages, blocks and their parts, and account for the bubble.
        timing_warmup: steps, and test batches, that are not timed at first.
        timing_steps: steps, and test batches, that are timed then.
        trace: also write a trace of the last timed steps for Perfetto, and draw a timeline.
        seed: of weights, data order and masks.
        out: output folder; by default runs/<time>.
    """

    config: Path | None = None
    model: Model = "vig_digits"
    weights: Path | None = None
    new_classifier: bool = False
    graph: str | None = None
    aggregator: str | None = None
    stochastic_dilation: float = 0.0
    stem_stride: int | None = None
    compat: Compat | None = None
    impl: Impl = "fused"
    compile: bool = False
    norm: Norm = "batch"
    drop_path: float | None = None
    dropout: float = 0.0
    data: str = "digits"
    data_dir: Path = Path("data")
    download: bool = False
    image_size: int | str | None = None
    crop_pct: float | None = None
    recipe: Recipe | None = None
    augment: bool | None = None
    random_crop: RandomCrop | None = None
    auto_augment: str | None = None
    color_jitter: float | None = None
    erasing: float | None = None
    mixup: float | None = None
    cutmix: float | None = None
    smoothing: float | None = None
    repeated_augment: int | None = None
    workers: int = 0
    skip_bad_images: bool = False
    stages: int | Literal["auto"] | Path = 1
    microbatches: int = 1
    dp: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1
    sync: Sync = "double"
    device: Device = "auto"
    dtype: Dtype = "float32"
    boundary: Boundary = "full"
    recompute: Recompute = "never"
    detect_anomaly: bool = False
    threads: int | None = None
    timeout: float | None = None
    opt: Optimizer | None = None
    lr: float | None = None
    weight_decay: float | None = None
    layer_decay: float = 1.0
    lr_schedule: LrSchedule | None = None
    min_lr: float | None = None
    warmup_epochs: int | None = None
    warmup_lr: float = 1e-6
    clip: float | None = None
    ema: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    checkpoint_every: int | str = "10m"
    keep: int = 2
    resume: str | None = None
    max_restarts: int = 0
    elastic: bool = False
    stop_before: str | None = None
    on_nan: OnNan = "stop"
    evaluate_every: int = 1
    timing: bool = False
    timing_warmup: int = 3
    timing_steps: int = 100
    trace: bool = False
    seed: int = 0
    out: Path | None = None


def with_model_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in what the recipe decides, and then the model.

    What is still `None` then is off, or found out later. Values that depend on the batch are
    already those of this batch.

    Raises:
        InputError: an option asks for augmentation and --no-augment for none.
    """
    model = MODEL_DEFAULTS[config.model]
    recipe = RECIPES[config.recipe] if config.recipe else NO_RECIPE
    defaults = asdict(model) | {k: v for k, v in asdict(recipe).items() if v is not None}
    asked_for = [name for name in _AUGMENTATION if _is_on(config, name)]
    if config.augment is False:
        if asked_for:
            raise InputError(
                f"{flag(asked_for[0])} {getattr(config, asked_for[0])}: is an augmentation, but "
                "--no-augment turns all of them off; leave one of the two out"
            )
        defaults |= {name: getattr(NO_RECIPE, name) for name in _AUGMENTATION}
    elif asked_for:
        defaults["augment"] = True

    batch_size: int = config.batch_size or defaults["batch_size"]
    if defaults["lr_images"] is not None:
        defaults["lr"] *= batch_size / defaults["lr_images"]
    defaults["ema"] **= batch_size / defaults["ema_images"]
    size = parse_image_size(config.image_size or defaults["image_size"])
    if size is not None and max(size) <= SMALL_IMAGE:
        defaults["crop_pct"] = 1.0
    missing = {
        f.name: defaults[f.name]
        for f in fields(config)
        if getattr(config, f.name) is None and defaults.get(f.name) is not None
    }
    return replace(config, **missing)


def uses_timm(config: TrainConfig) -> bool:
    """Whether timm augments the images of these resolved options.

    Without a recipe and its parts, `augment` alone is vigpipe's own crop and mirroring.
    """
    parts = any(_is_on(config, name) for name in _AUGMENTATION)
    return bool(config.augment) and (config.recipe is not None or parts)


def _is_on(config: TrainConfig, name: str) -> bool:
    return getattr(config, name) not in (None, getattr(NO_RECIPE, name))


def parse_image_size(value: int | str | None) -> tuple[int, int] | None:
    """SIDE or HEIGHTxWIDTH as (H, W); None for None.

    Raises:
        InputError: it is neither.
    """
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})(?:x([0-9]{1,6}))?", str(value).strip())
    size = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(1 <= side <= _LARGEST_SIDE for side in size):
        raise InputError(
            f"--image-size {value}: must be a side or HEIGHTxWIDTH in pixels, each from 1 to "
            f"{_LARGEST_SIDE}, such as 224 or 224x160"
        )
    return size


def check_numbers(config: TrainConfig) -> None:
    """Raise InputError for a number outside its range, or an image size that is none."""
    parse_image_size(config.image_size)
    bounds: dict[str, tuple[float, float]] = {
        "stochastic_dilation": (0, 1),
        "stem_stride": (1, 1 << 10),
        "drop_path": (0, 0.99),
        "dropout": (0, 0.99),
        "crop_pct": (0.1, 1),
        "color_jitter": (0, 1),
        "erasing": (0, 1),
        "mixup": (0, 100),
        "cutmix": (0, 100),
        "smoothing": (0, 0.99),
        "repeated_augment": (1, 64),
        "workers": (0, 256),
        "threads": (1, 1 << 12),
        "timeout": (1, 1e6),
        "lr": (0, 1e6),
        "weight_decay": (0, 1e6),
        "layer_decay": (1e-3, 1),
        "min_lr": (0, 1e6),
        "warmup_lr": (0, 1e6),
        "warmup_epochs": (0, 1e6),
        "clip": (1e-12, 1e12),
        "ema": (0, 1),
        "batch_size": (1, 1 << 24),
        "epochs": (1, 1e6),
        "steps": (1, 1e9),
        "keep": (1, 1e6),
        "max_restarts": (0, 1e6),
        "evaluate_every": (1, 1e6),
        "timing_warmup": (0, 1e6),
        "timing_steps": (1, 1e6),
        "seed": (0, (1 << 63) - 1),
    }
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:  # NaN fails too
            raise InputError(
                f"{flag(name)} {value}: must be a number from {_plain(least)} to {_plain(most)}"
            )

    timed = config.timing or config.trace
    if timed and config.steps is not None and config.steps <= config.timing_warmup:
        raise InputError(
            f"--steps {config.steps}: no step is left to be timed after --timing-warmup "
            f"{config.timing_warmup}; take more steps or a shorter warm-up"
        )


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")
