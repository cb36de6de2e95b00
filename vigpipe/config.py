"""Every option of a run: its meaning and its default, from flags and TOML files."""

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vigpipe.choices import Device, Dtype, Graph, LrSchedule, Model, Norm, Optimizer, Schedule, Sync
from vigpipe.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of a training run; `None` stands for the model's own default.

    Attributes:
        config: TOML file of these options, as a run writes it; flags win over it.
        model: the model to train.
        graph: graph of vig_study: the study's pixel grid, or kNN.
        norm: normalisation layer; the result of layer and group does not depend on the
            micro-batches.
        drop_path: drop-path rate of the last block, rising linearly from 0 in the first.
        dropout: dropout rate in the readout.
        data: digits, cifar10, fake, or a folder with train/<class>/<image> and
            test/<class>/<image>.
        data_dir: folder of the CIFAR-10 files.
        download: fetch CIFAR-10 if it is not there.
        image_size: resize images to this square.
        augment: cut and mirror training images at random.
        skip_bad_images: leave out images that cannot be read, and count them.
        stages: ranks of one pipeline, or a plan file from stages/.
        microbatches: micro-batches each replica cuts its share of a batch into.
        dp: data-parallel replicas.
        schedule: order of forwards and backwards.
        virtual_stages: stages a rank, for interleaved1f1b and loopedbfs.
        sync: how gradients are added up over the replicas: after the pipeline has drained, in twice
            their precision (double) or their own (drain), or by DDP during the last backward.
        device: where to run; auto takes CUDA if there is a GPU.
        dtype: of weights and features; bfloat16 keeps float32 weights and lowers the matrix
            products.
        threads: threads a rank; else OMP_NUM_THREADS, else the host's cores divided by its ranks.
        timeout: seconds after which a rank that waits for a silent peer gives up.
        opt: optimizer.
        lr: learning rate.
        weight_decay: weight decay, not applied to biases and norms.
        lr_schedule: course of the learning rate after the warm-up.
        min_lr: learning rate at the end of the cosine.
        warmup_epochs: epochs of linear warm-up.
        warmup_lr: learning rate at the start of the warm-up.
        clip: largest norm of the gradient over all stages.
        batch_size: B, samples of one optimizer step over all replicas.
        epochs: passes over the training images.
        steps: optimizer steps; wins over epochs.
        seed: of weights, data order and masks.
        out: output folder; by default runs/<time>.
    """

    config: Path | None = None
    model: Model = "vig_digits"
    graph: Graph | None = None
    norm: Norm = "batch"
    drop_path: float | None = None
    dropout: float = 0.0
    data: str = "digits"
    data_dir: Path = Path("data")
    download: bool = False
    image_size: int | None = None
    augment: bool | None = None
    skip_bad_images: bool = False
    stages: int | Path = 1
    microbatches: int = 1
    dp: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1
    sync: Sync = "double"
    device: Device = "auto"
    dtype: Dtype = "float32"
    threads: int | None = None
    timeout: float = 300.0
    opt: Optimizer | None = None
    lr: float | None = None
    weight_decay: float | None = None
    lr_schedule: LrSchedule | None = None
    min_lr: float | None = None
    warmup_epochs: int | None = None
    warmup_lr: float = 1e-6
    clip: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    out: Path | None = None


@dataclass(frozen=True)
class ModelDefaults:
    """What an option left at `None` means for one model.

    Attributes:
        image_mean: subtracted from pixels in 0 ... 1.
        image_std: what they are divided by after that.
    """

    opt: Optimizer
    lr: float
    weight_decay: float
    lr_schedule: LrSchedule
    min_lr: float
    warmup_epochs: int
    batch_size: int
    epochs: int
    drop_path: float = 0.0
    augment: bool = False
    image_size: int | None = None
    image_mean: float = 0.0
    image_std: float = 1.0


# Han et al. 2022 (arXiv:2206.00272), table 3: lr 2e-3 for 1,024 images a step, in proportion for
# fewer.
_PUBLISHED = ModelDefaults(
    opt="adamw",
    lr=2.5e-4,
    weight_decay=0.05,
    lr_schedule="cosine",
    min_lr=1e-5,
    warmup_epochs=20,
    batch_size=128,
    epochs=300,
    drop_path=0.1,
    augment=True,
    image_size=224,
    image_mean=0.5,
    image_std=0.5,
)

MODEL_DEFAULTS: dict[str, ModelDefaults] = {
    "vig_digits": ModelDefaults("adamw", 4e-3, 0.05, "cosine", 1e-5, 2, 100, 15),
    # The study's mini-batch is 1,000, which needs about 100 GB in one piece; 100 fits a laptop.
    "vig_study": ModelDefaults("adam", 1e-4, 0.0, "constant", 0.0, 0, 100, 10),
    "vig_ti_224": _PUBLISHED,
    "vig_s_224": _PUBLISHED,
    "vig_b_224": _PUBLISHED,
}


def with_model_defaults(config: TrainConfig) -> TrainConfig:
    """Fill in what the model decides; what is still `None` then is off, or found out later."""
    defaults = asdict(MODEL_DEFAULTS[config.model])
    missing = {
        f.name: defaults[f.name]
        for f in fields(config)
        if getattr(config, f.name) is None and defaults.get(f.name) is not None
    }
    return replace(config, **missing)


def check_numbers(config: TrainConfig) -> None:
    """Raise InputError for a number outside its range."""
    bounds: dict[str, tuple[float, float]] = {
        "drop_path": (0, 0.99),
        "dropout": (0, 0.99),
        "image_size": (1, 1 << 14),
        "threads": (1, 1 << 12),
        "timeout": (1, 1e6),
        "lr": (0, 1e6),
        "weight_decay": (0, 1e6),
        "min_lr": (0, 1e6),
        "warmup_lr": (0, 1e6),
        "warmup_epochs": (0, 1e6),
        "clip": (1e-12, 1e12),
        "batch_size": (1, 1 << 24),
        "epochs": (1, 1e6),
        "steps": (1, 1e9),
        "seed": (0, (1 << 63) - 1),
    }
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= most:  # NaN fails too
            raise InputError(
                f"{flag(name)} {value}: must be a number from {_plain(least)} to {_plain(most)}"
            )


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def as_toml(config: TrainConfig) -> dict[str, Any]:
    """The options as a TOML table that `--config` reads back: `None` left out, paths as text."""
    table = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    return {k: v for k, v in table.items() if v is not None and k != "config"}


def read_config_file(arguments: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Find `--config FILE` among the arguments and read the file.

    Returns:
        Its options by flag name, and its path; empty without the flag.

    Raises:
        InputError: the file cannot be read, is no TOML, has a key that is no option or a list.
    """
    path = None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path = Path(arguments[i + 1])
        elif argument.startswith("--config="):
            path = Path(argument.removeprefix("--config="))
    if path is None:
        return {}, ""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: not a TOML file ({error})") from error
    known = {f.name for f in fields(TrainConfig)} - {"config"}
    for key, value in table.items():
        if key not in known:
            raise InputError(
                f"{path}: unknown key {key!r}; the keys are {', '.join(sorted(known))}"
            )
        if isinstance(value, list | dict):
            raise InputError(f"{path}: {key} = {value}: must be a single value")
    return {key.replace("_", "-"): value for key, value in table.items()}, str(path)
