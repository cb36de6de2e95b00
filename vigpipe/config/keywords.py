"""The options of a training run as keyword arguments of `vigpipe.train`, for editors and types."""

from pathlib import Path
from typing import Literal, TypedDict

from vigpipe.config import choices
from vigpipe.schedules import Schedule


class TrainKeywords(TypedDict, total=False):
    """The options of `TrainConfig`, which explains them; a path may also be given as text."""

    config: Path | str | None
    model: choices.Model
    weights: Path | str | None
    new_classifier: bool
    graph: str | None
    aggregator: str | None
    stochastic_dilation: float
    stem_stride: int | None
    compat: choices.Compat | None
    impl: choices.Impl
    compile: bool
    cuda_graph: bool | None
    norm: choices.Norm | choices.GraphNorm | None
    layers: int | None
    width: int | None
    heads: int | None
    drop_path: float | None
    dropout: float
    data: str
    data_dir: Path | str
    download: bool
    features: choices.Features | None
    symmetric: bool | None
    sampler: choices.Sampler | None
    partition: choices.Partition | None
    parts: int | None
    repartition_every: int | None
    merge: int | None
    sample_nodes: int | None
    sample_edges: int | None
    roots: int | None
    walk_length: int | None
    coverage: int | None
    batch_nodes: int | None
    layer_nodes: int | None
    fanout: str | None
    image_size: int | str | None
    crop_pct: float | None
    recipe: choices.Recipe | None
    augment: bool | None
    random_crop: choices.RandomCrop | None
    auto_augment: str | None
    color_jitter: float | None
    erasing: float | None
    mixup: float | None
    cutmix: float | None
    smoothing: float | None
    repeated_augment: int | None
    workers: int
    skip_bad_images: bool
    validation: float
    stages: int | Literal["auto"] | Path | str
    microbatches: int
    dp: int
    schedule: Schedule
    virtual_stages: int
    shards: int
    split: choices.Split | None
    adjacency: choices.Edging
    chunks: int
    halo: str | None
    sparse_threads: int
    sync: choices.Sync | None
    strategy: choices.Strategy
    average_every: int | None
    average: choices.Average | None
    outer_lr: float | None
    outer_momentum: float | None
    overlap: int | None
    pairs: choices.Pairs | None
    answer: choices.Answer | None
    gossip_between: choices.Between | None
    staleness: int | Literal["none"] | None
    carry_moments: bool
    partition_input: bool
    divided: choices.Divided | None
    branch_rescale: bool
    compress: str
    items: choices.Items | None
    final: choices.Final | None
    replay: Path | str | None
    device: choices.Device
    dtype: choices.Dtype
    tf32: bool
    boundary: choices.Boundary
    recompute: choices.Recompute
    detect_anomaly: bool
    threads: int | None
    timeout: float | None
    opt: choices.Optimizer | None
    lr: float | None
    weight_decay: float | None
    decay: choices.Decay | None
    layer_decay: float
    lr_schedule: choices.LrSchedule | None
    min_lr: float | None
    warmup_epochs: int | None
    warmup_lr: float
    clip: float | None
    ema: float | None
    batch_size: int | None
    epochs: int | None
    steps: int | None
    checkpoint_every: int | str
    keep: int
    keep_best: choices.KeepBest | None
    resume: str | None
    max_restarts: int
    elastic: bool
    stop_before: str | None
    on_nan: choices.OnNan
    evaluate_every: int
    log_every: int | str | None
    track: choices.Track | None
    timing: bool
    timing_warmup: int
    timing_steps: int
    trace: bool
    seed: int
    out: Path | str | None
