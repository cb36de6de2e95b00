"""Default values of the options that are left at `None`, for each recipe and each model."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from vigpipe.config import choices


@dataclass(frozen=True)
class ModelDefaults:
    """A model's defaults of options left at `None`; most fields mean what `TrainConfig` says."""

    opt: choices.Optimizer
    lr: float  # for a batch of `lr_images` images, and in proportion for others
    weight_decay: float
    lr_schedule: choices.LrSchedule
    min_lr: float
    warmup_epochs: int
    batch_size: int | None
    epochs: int
    lr_images: int | None = None  # None if the learning rate does not depend on the batch size
    drop_path: float = 0.0
    augment: bool = False
    image_size: int | None = None
    crop_pct: float = 1.0
    # The mean that is subtracted from the pixels, which lie in 0 ... 1, and the standard deviation
    # that they are divided by afterwards: a number, or one for each channel.
    image_mean: tuple[float, ...] = (0.0,)
    image_std: tuple[float, ...] = (1.0,)
    exif: bool = True
    job: choices.JobName = "images"  # what the model is for
    norm: choices.Norm | choices.GraphNorm = "batch"
    dist_head: bool | None = None
    sampler: choices.Sampler | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    aggregator: str | None = None
    features: choices.Features | None = None
    symmetric: bool | None = None
    decay: choices.Decay | None = None


# Han et al. 2022 (arXiv:2206.00272), table 3: lr 2e-3 for 1,024 images a step.
_PUBLISHED = ModelDefaults(
    opt="adamw",
    lr=2.5e-4,
    lr_images=128,
    weight_decay=0.05,
    lr_schedule="cosine",
    min_lr=1e-5,
    warmup_epochs=20,
    batch_size=128,
    epochs=300,
    drop_path=0.1,
    augment=True,
    image_size=224,
    crop_pct=0.9,
    image_mean=(0.5,),
    image_std=(0.5,),
)
# The models without kNN take ImageNet's own mean and deviation, and are trained alike otherwise.
_MOBILE = replace(
    _PUBLISHED,
    image_mean=(0.485, 0.456, 0.406),
    image_std=(0.229, 0.224, 0.225),
    dist_head=True,
)
_CIFAR = replace(_PUBLISHED, lr=1e-3, warmup_epochs=5, epochs=100, image_size=32, crop_pct=1.0)

# Kipf & Welling 2017 (arXiv:1609.02907): Adam with this learning rate, for 200 epochs.
_GRAPH = ModelDefaults(
    opt="adam",
    lr=1e-2,
    weight_decay=0.0,
    lr_schedule="constant",
    min_lr=0.0,
    warmup_epochs=0,
    batch_size=None,
    epochs=200,
    job="graph",
    norm="none",
    sampler="full",
    layers=2,
    width=128,
    features="raw",
    symmetric=True,
    decay="all",
)

GRAPH_MODEL = "gcn"  # whose defaults stand for those of all models of graphs

MODEL_DEFAULTS: dict[str, ModelDefaults] = {
    "vig_digits": ModelDefaults("adamw", 4e-3, 0.05, "cosine", 1e-5, 2, 100, 15),
    # The study's mini-batch of 1,000 needs about 100 GB if it is not cut; 100 fits a laptop.
    "vig_study": ModelDefaults("adam", 1e-4, 0.0, "constant", 0.0, 0, 100, 10),
    "vig_ti_224": _PUBLISHED,
    "vig_s_224": _PUBLISHED,
    "vig_b_224": _PUBLISHED,
    "pvig_ti_224": _PUBLISHED,
    "pvig_s_224": _PUBLISHED,
    "pvig_m_224": _PUBLISHED,
    "pvig_b_224": replace(_PUBLISHED, crop_pct=0.95),
    "vig_cifar_ti": _CIFAR,
    "pvig_cifar_ti": _CIFAR,
    **dict.fromkeys(choices.MOBILE_MODELS, _MOBILE),
    "mobilevigv2_cifar_ti": replace(_CIFAR, dist_head=True),
    "greedyvig_cifar_ti": replace(_CIFAR, dist_head=True),
    "gcn": _GRAPH,
    "sage": replace(_GRAPH, aggregator="mean"),
    "gat": replace(_GRAPH, aggregator="v1", heads=8),
    "gin": _GRAPH,
    "gcn2": replace(_GRAPH, layers=16),
}


# What a recipe can turn on, turned off.
NO_RECIPE: dict[str, Any] = {
    "random_crop": "box",
    "auto_augment": "none",
    "color_jitter": 0.0,
    "erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "smoothing": 0.0,
    "repeated_augment": 1,
    "layer_decay": 1.0,
    # Decay per step for a batch of `ema_images` images. For a batch of B images it is raised to the
    # power B / ema_images, so that the average covers the same number of images.
    "ema": 0.0,
    "ema_images": 1,
}
_OF_ALL = {
    "opt": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.05,
    "lr_schedule": "cosine",
    "min_lr": 1e-5,
    "augment": True,
    "smoothing": 0.1,
}

# What each recipe sets, by names of `ModelDefaults` and `NO_RECIPE`; the rest is left to those.
RECIPES: dict[choices.Recipe, dict[str, Any]] = {
    # Han et al. 2022 (arXiv:2206.00272), table 3, and the command of its reference code.
    "imagenet": {
        **_OF_ALL,
        "lr_images": 1024,
        "warmup_epochs": 20,
        "epochs": 300,
        "drop_path": 0.1,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "color_jitter": 0.4,
        "erasing": 0.25,
        "mixup": 0.8,
        "cutmix": 1.0,
        "repeated_augment": 3,
        "ema": 0.99996,
        "ema_images": 1024,
    },
    "cifar": {
        **_OF_ALL,
        "lr_images": 100,
        "warmup_epochs": 5,
        "epochs": 100,
        "random_crop": "shift",
        "erasing": 0.1,
        "mixup": 0.2,
        "cutmix": 0.5,
        "ema": 0.995,
        "ema_images": 100,
    },
    # The fine-tuning of ViT-L in the code of He et al. 2022 (arXiv:2111.06377), without mixing.
    "finetune": {
        **_OF_ALL,
        "lr": 5e-4,
        "lr_images": 128,
        "min_lr": 1e-6,
        "warmup_epochs": 1,
        "epochs": 20,
        "drop_path": 0.1,
        "layer_decay": 0.75,
    },
}


def default_of(name: str, model: str, recipe: choices.Recipe | None = None) -> object:
    """Return an option's default with a model and a recipe; None where neither has one.

    The learning rate and the decay of the moving average are for so many images a step, in words.
    """
    of_recipe = RECIPES[recipe] if recipe else {}
    defaults = asdict(MODEL_DEFAULTS[model]) | NO_RECIPE | of_recipe
    value, images = defaults.get(name), defaults.get(f"{name}_images")
    return f"{value} for {images:,} images a step" if value and images else value
