"""Which options are for images only, for graphs only, and for one way to sample a graph only."""

OF_IMAGES = (
    *("new_classifier", "graph", "stochastic_dilation", "stem_stride", "compat", "compile"),
    *("divided", "branch_rescale"),
    *("cuda_graph", "drop_path", "image_size", "crop_pct", "recipe", "augment", "random_crop"),
    *("auto_augment", "color_jitter", "erasing", "mixup", "cutmix", "smoothing"),
    *("repeated_augment", "workers", "skip_bad_images", "validation", "batch_size"),
)
OF_GRAPHS = (
    *("layers", "width", "heads", "features", "symmetric", "sampler", "partition", "parts"),
    *("repartition_every", "merge", "sample_nodes", "sample_edges", "roots", "walk_length"),
    *("coverage", "batch_nodes", "layer_nodes", "fanout", "decay", "partition_input", "split"),
    *("adjacency", "chunks", "halo", "sparse_threads"),
)
OF_LAYERS = ("fastgcn", "neighbour")  # samplers that give every layer nodes of its own
OF_SAMPLERS: dict[str, tuple[str, ...]] = {
    "parts": ("partition", "parts", "repartition_every", "merge"),
    "saint-node": ("sample_nodes", "coverage"),
    "saint-edge": ("sample_edges", "coverage"),
    "saint-walk": ("roots", "walk_length", "coverage"),
    "fastgcn": ("batch_nodes", "layer_nodes"),
    "neighbour": ("batch_nodes", "fanout"),
}
