"""The commands `vigpipe dataset`: check options, then import what makes and checks graphs."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vigpipe.config.options import TrainConfig, as_given, check_numbers, given
from vigpipe.config.verbs import ImportConfig, PrepareConfig
from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import check_new_file, check_new_folder
from vigpipe.messages import one_line

if TYPE_CHECKING:
    from vigpipe.graphs.prepared.manifest import Manifest

MADE_BY = "vigpipe dataset debian"  # the comment of the .npz file


def make_debian_graph(out: Path, lists: Path | None = None) -> None:
    """Write the graph of apt's lists, by default this machine's, as .npz file; print its size."""
    check_new_file(out, "", (".npz",), mark=MADE_BY, overwrite=None)
    import numpy as np

    from vigpipe.graphs import debian

    arrays: dict[str, Any] = debian.make_arrays(debian.read_packages(lists or debian.LISTS))
    try:
        with replacing(out) as partial, partial.open("w+b") as file:
            np.savez_compressed(file, **arrays)
            with zipfile.ZipFile(file, "a") as archive:
                archive.comment = MADE_BY.encode()
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    print(
        f"{out}: {len(arrays['y'])} nodes, {len(arrays['edge_src'])} edges, "
        f"{len(arrays['classes'])} classes"
    )


def check_import(config: ImportConfig) -> None:
    """Raise InputError for what is wrong by itself with the options of an import."""
    tables = given(config, ("nodes", "edges", "features", "like"), ImportConfig)
    if (config.data is None) == (config.edges is None):
        what = "neither" if config.data is None else "both"
        raise InputError(
            f"--edges, --data: {what} given; name tables of --nodes and --edges, or a whole graph "
            "as --data"
        )
    if config.data is not None and tables:
        name, value = next(iter(tables.items()))
        raise InputError(
            f"{as_given(name, value)}: is for tables, and --data is a whole graph; leave it out"
        )
    if config.data is None and config.nodes is None and config.features is None:
        raise InputError(
            "--nodes: is missing beside --edges; name a table with a row for each node, or a file "
            "of --features"
        )
    of_columns = given(config, ("like", "numbers", "categories", "drop"), ImportConfig)
    if config.features is not None and of_columns:
        name, value = next(iter(of_columns.items()))
        raise InputError(
            f"{as_given(name, value)}: is for columns that become features, and --features takes "
            "their place; leave one of the two out"
        )
    made_again = given(config, ("numbers", "categories"), ImportConfig)
    if config.like is not None and made_again:
        name, value = next(iter(made_again.items()))
        raise InputError(
            f"{as_given(name, value)}: is a choice, and --like {config.like} has made all; leave "
            "one of the two out"
        )
    if config.validation and not config.test:
        raise InputError(
            f"--validation {config.validation}: is drawn with the test nodes, where there is no "
            "split; add --test 0.2"
        )
    for name in ("test", "validation"):
        share = getattr(config, name)
        if not 0 <= share < 1:  # NaN fails too
            raise InputError(
                f"--{name} {share}: must be a share of the nodes, from 0 to less than 1"
            )
    check_numbers(TrainConfig(seed=config.seed))


def import_dataset(out: Path, config: ImportConfig) -> None:
    """Write a graph file of what people have; print its size, and what they should know."""
    check_import(config)
    check_new_file(out, "", (".npz",), overwrite=None)
    from vigpipe.graphs.graph import SPLITS
    from vigpipe.graphs.imports.read import read_imported

    imported = read_imported(config)
    graph = imported.write(out)
    for note in imported.notes:
        print(one_line(f"note: {note}"))
    sizes = f"{graph.num_nodes:,} nodes, {graph.num_edges:,} directed edges"
    weighted = " with weights" * (graph.edge_weights is not None)
    classes = "no classes"
    if graph.num_classes and not imported.has_split:
        classes = f"{graph.num_classes:,} classes, no split"
    elif graph.num_classes:
        counts = (f"{len(graph.nodes_of(part)):,} {name}" for name, part in SPLITS.items())
        classes = f"{graph.num_classes:,} classes, {', '.join(counts)} nodes"
    print(f"{out}: {sizes}{weighted}, {graph.num_features:,} features, {classes}")


def prepare_dataset(source: str, out: Path, options: PrepareConfig) -> None:
    """Cut a graph, named as for --data, into parts, and write them as a folder."""
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}: must be 0 or more")
    check_new_folder(out)
    from vigpipe.graphs.partitions.make import make_partition
    from vigpipe.graphs.prepared.graph import PreparedGraph
    from vigpipe.graphs.prepared.write import write_folder
    from vigpipe.graphs.sources import open_graph

    graph = open_graph(
        source,
        data_dir=options.data_dir,
        download=options.download,
        features=options.features,
        symmetric=options.symmetric,
        seed=options.seed,
        multi_label=options.multi_label,
    )
    for note in graph.notes:
        print(note)
    scaling, symmetric = options.features or "raw", options.symmetric is not False
    if isinstance(graph, PreparedGraph):
        scaling, symmetric = graph.manifest.scaling, graph.manifest.symmetric
    partition = make_partition(graph, options.partition, options.parts, options.seed)
    print(partition, flush=True)
    manifest = write_folder(
        out, graph, partition, scaling=scaling, symmetric=symmetric, seed=options.seed
    )
    print(_size(out, manifest))


def check_dataset(folder: Path) -> None:
    """Read every file of a prepared folder, and print what is in it."""
    from vigpipe.graphs.prepared.read import check_folder

    print(f"{_size(folder, check_folder(folder))}: every file is what the manifest says")


def _size(folder: Path, manifest: "Manifest") -> str:
    num_bytes = sum(facts.bytes for facts in manifest.files.values())
    return (
        f"{folder}: {manifest.nodes:,} nodes, {manifest.edges:,} directed edges, "
        f"{manifest.features:,} features ({manifest.scaling}), in {manifest.num_parts:,} parts "
        f"({manifest.partition}), {num_bytes / 1e9:,.2f} GB"
    )
