"""The options of a run in the groups of `--help`; those in `SHORT` are shown without --help-all."""

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("model", "weights", "new_classifier", "graph", "aggregator", "stochastic_dilation"),
        *("stem_stride", "norm", "drop_path", "dropout", "compat", "impl", "compile", "cuda_graph"),
        *("layers", "width", "heads", "dtype", "tf32"),
    ),
    "Data": (
        *("data", "data_dir", "download", "image_size", "crop_pct", "augment", "random_crop"),
        *("auto_augment", "color_jitter", "erasing", "mixup", "cutmix", "smoothing"),
        *("repeated_augment", "workers", "skip_bad_images", "validation"),
        *("features", "symmetric", "sampler", "partition", "parts"),
        *("repartition_every", "merge", "sample_nodes", "sample_edges", "roots", "walk_length"),
        *("coverage", "batch_nodes", "layer_nodes", "fanout"),
    ),
    "Training": (
        *("config", "out", "recipe", "epochs", "steps", "batch_size", "opt", "lr", "weight_decay"),
        *(
            "decay",
            "layer_decay",
            "lr_schedule",
            "min_lr",
            "warmup_epochs",
            "warmup_lr",
            "clip",
            "ema",
        ),
        *("seed", "evaluate_every", "log_every", "track", "on_nan", "detect_anomaly"),
    ),
    "Layout": (
        *("stages", "microbatches", "schedule", "virtual_stages", "boundary", "recompute"),
        *("shards", "split", "adjacency", "chunks", "halo"),
        *("device", "threads", "sparse_threads", "timeout"),
    ),
    "Replicas": (
        *("dp", "sync", "elastic", "strategy", "average_every", "average"),
        *(
            "outer_lr",
            "outer_momentum",
            "overlap",
            "pairs",
            "answer",
            "gossip_between",
            "staleness",
            "carry_moments",
            "partition_input",
            "divided",
            "branch_rescale",
            "compress",
            "items",
            "final",
            "replay",
        ),
    ),
    "Checkpoints": (
        *("checkpoint_every", "keep", "keep_best", "resume", "max_restarts", "stop_before"),
    ),
    "Timing": ("timing", "timing_warmup", "timing_steps", "trace"),
}
SHORT = frozenset(
    (
        *("model", "weights", "data", "image_size", "workers", "validation"),
        *("layers", "width", "dropout", "sampler", "partition", "parts"),
        *("config", "out", "recipe", "epochs", "batch_size", "lr", "track"),
        *("stages", "microbatches", "schedule", "device", "dp"),
        *("checkpoint_every", "keep_best", "resume", "timing"),
    )
)
