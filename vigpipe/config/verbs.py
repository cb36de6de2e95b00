"""Options of the commands that use a model without training it; without torch, as for `--help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vigpipe.config.choices import Device, Dtype, Model
from vigpipe.config.options import TrainConfig
from vigpipe.schedules import Schedule

Format = Literal["text", "json"]


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Options of `vigpipe graph`.

    Attributes:
        image: the image file.
        model: the model; the weights file says which, where it can.
        weights: safetensors or torch file; without it the weights are random.
        node: X,Y, a pixel's column and row in the drawn image: the patch there is the node. By
            default the centre.
        block: I,J,... numbers of the blocks to draw; by default the first, the middle and the last.
        graph: graph policy of every block, a comma list; by default the model's own.
        image_size: SIDE or HEIGHTxWIDTH that the image is resized and cropped to; by default the
            model's own.
        out: the picture to write: .png, .pdf or .svg.
    """

    image: Path
    model: Model | None = None
    weights: Path | None = None
    node: str | None = None
    block: str | None = None
    graph: str | None = None
    image_size: str | None = None
    out: Path = Path("graph.png")


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Options of `vigpipe predict`.

    Attributes:
        weights: safetensors or torch file.
        model: the model, where the weights file does not say which.
        image_size: SIDE or HEIGHTxWIDTH that images are resized and cropped to; by default that of
            training.
        format: text, or json: one object a line.
        skip_bad_images: leave out images that cannot be read, and count them.
        batch_size: images that run at once, over all replicas.
        stages: ranks of one pipeline, or a plan file from stages/.
        microbatches: micro-batches each replica cuts its share of a batch into.
        dp: data-parallel replicas.
        schedule: order of the forwards.
        virtual_stages: stages a rank, for interleaved1f1b and loopedbfs.
        device: where to run; auto takes CUDA if there is a GPU.
        dtype: of weights and features; bfloat16 keeps float32 weights and lowers the matrix
            products.
        threads: threads a rank; else OMP_NUM_THREADS, else the host's cores divided by its ranks.
        timeout: seconds after which a rank that waits for a silent peer gives up.
    """

    weights: Path
    model: Model | None = None
    image_size: str | None = None
    format: Format = "text"
    skip_bad_images: bool = False
    batch_size: int = 32
    stages: int | Path = 1
    microbatches: int = 1
    dp: int = 1
    schedule: Schedule = "gpipe"
    virtual_stages: int = 1
    device: Device = "auto"
    dtype: Dtype = "float32"
    threads: int | None = None
    timeout: float = 300.0


@dataclass(frozen=True, kw_only=True)
class PlanConfig(TrainConfig):
    """Options of `vigpipe plan`: those of train, and what a plan is wanted for.

    Attributes:
        stages: ranks of one pipeline.
        microbatches: micro-batches of each replica; auto tries all that make sense.
        schedule: order of forwards and backwards; auto tries all.
        memory_limit: most memory of a rank, such as 16GB.
        bandwidth: between neighbouring ranks, such as 10Gb/s; by default what is measured here.
        latency: of a message between them, such as 20us; likewise.
        ranks_per_host: hosts are filled in the order of ranks; by default all are on one.
        profile: what the blocks cost, from an earlier call; by default it is measured.
        explain: say which stage limits the step and what would help most.
        out: the plan file; by default stages/<model>-<stages>.toml.
    """

    model: Model = "vig_ti_224"
    data: str = "fake"
    stages: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    microbatches: int | Literal["auto"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    schedule: Schedule | Literal["auto"] = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    memory_limit: str | None = None
    bandwidth: str | None = None
    latency: str | None = None
    ranks_per_host: int | None = None
    profile: Path | None = None
    explain: bool = False


@dataclass(frozen=True, kw_only=True)
class TimeConfig(TrainConfig):
    """Options of `vigpipe time`: those of train; every other step after the warm-up is timed.

    Attributes:
        test_batches: batches of the evaluation, the warm-up among them.
    """

    steps: int | None = 23
    test_batches: int = 8
    timing: bool = True
    trace: bool = True
