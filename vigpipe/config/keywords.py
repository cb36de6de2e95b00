"""The options of a training run as keyword arguments of `vigpipe.train`, for editors and types.

Written by `python -m docs.keywords` from `TrainConfig`, and a test compares the two.
"""

from pathlib import Path
from typing import Any, Literal, TypedDict

from vigpipe.config import choices
from vigpipe.schedules import Schedule


class TrainKeywords(TypedDict, total=False):
    """The options of `TrainConfig`, which explains them; a path may also be given as text."""

    model: choices.Model
    weights: Path | str | None
    new_classifier: bool
    graph: str | None
    aggregator: str | None
    stochastic_dilation: float
    stem_stride: int | None
    norm: choices.Norm | choices.GraphNorm | None
    drop_path: float | None
    dropout: float
    compat: choices.Compat | None
    dist_head: bool | None
    impl: choices.Impl
    compile: bool
    cuda_graph: bool | None
    layers: int | None
    width: int | None
    heads: int | None
    dtype: choices.Dtype
    tf32: bool
    data: Any
    data_dir: Path | str
    download: bool
    image_size: int | str | None
    crop_pct: float | None
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
    test: float
    exif: bool | None
    features: choices.Features | None
    symmetric: bool | None
    multi_label: bool
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
    config: Path | str | None
    out: Path | str | None
    recipe: choices.Recipe | None
    epochs: int | None
    steps: int | None
    batch_size: int | None
    opt: choices.Optimizer | None
    lr: float | None
    weight_decay: float | None
    decay: choices.Decay | None
    layer_decay: float | None
    lr_schedule: choices.LrSchedule | None
    min_lr: float | None
    warmup_epochs: int | None
    warmup_lr: float
    freeze: str | None
    class_weights: Path | str | None
    clip: float | None
    ema: float | None
    seed: int
    evaluate_every: int
    log_every: int | str | None
    track: choices.Track | None
    on_nan: choices.OnNan
    detect_anomaly: bool
    stages: int | Literal["auto"] | (Path | str)
    microbatches: int
    schedule: Schedule
    virtual_stages: int
    boundary: choices.Boundary
    recompute: choices.Recompute
    shards: int
    split: choices.Split | None
    adjacency: choices.Edging
    chunks: int
    halo: str | None
    device: choices.Device
    threads: int | None
    sparse_threads: int
    timeout: float | None
    ports: str | None
    dp: int
    strategy: choices.Strategy
    sync: choices.Sync | None
    elastic: bool
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
    checkpoint_every: int | str
    keep: int
    keep_best: choices.KeepBest | None
    resume: Path | str | None
    max_restarts: int
    stop_before: str | None
    timing: bool
    timing_warmup: int
    timing_steps: int
    trace: bool
