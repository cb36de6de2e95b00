"""The commands `vigpipe dataset`: check options, then import what makes and checks graphs."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vigpipe.config.verbs import PrepareConfig
from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import check_new_file, check_new_folder

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
