"""Which options are for images only, and which for graphs only."""

OF_IMAGES = (
    *("new_classifier", "graph", "stochastic_dilation", "stem_stride", "compat", "compile"),
    *("cuda_graph", "drop_path", "image_size", "crop_pct", "recipe", "augment", "random_crop"),
    *("auto_augment", "color_jitter", "erasing", "mixup", "cutmix", "smoothing"),
    *("repeated_augment", "workers", "skip_bad_images", "validation", "batch_size"),
)
OF_GRAPHS = (
    *("layers", "width", "heads", "features", "symmetric", "sampler", "partition", "parts"),
    *("repartition_every", "merge", "decay"),
)
