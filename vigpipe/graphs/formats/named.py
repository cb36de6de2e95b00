"""Data sets that are known by their names: where their files lie, and who fetches them.

The files are fetched by torch-geometric, from the addresses that it knows, or from that of the Open
Graph Benchmark, and read by the readers of this folder: those of torch-geometric and ogb would
leave a pickled copy of each data set beside them.
"""

import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.graphs.formats import graphsaint, ogb, planetoid, reddit
from vigpipe.graphs.graph import Graph


@dataclass(frozen=True)
class DataSet:
    """A data set, with name, folder and files of torch-geometric or the Open Graph Benchmark."""

    name: str
    folder: str
    files: tuple[str, ...]
    read: Callable[[str, Path], Graph]  # given name and folder; InputError for unreadable files
    download: Callable[["DataSet", Path], Path]  # into a folder; returns that below it with files


def read(data_set: DataSet, data_dir: Path, *, download: bool) -> Graph:
    """Read a data set from its folder; InputError if files are missing, not fetched, or damaged."""
    folder = data_dir / data_set.folder
    # Path.exists raises PermissionError in a folder that cannot be searched.
    missing = [name for name in data_set.files if not os.path.exists(folder / name)]
    if missing and not download:
        raise InputError(
            f"{folder}: lacks {', '.join(missing)} of {data_set.name}; add --download to fetch "
            "them, or name the folder above with --data-dir"
        )
    if missing:
        _fetch(data_set, data_dir, folder)
    return data_set.read(data_set.name, folder)


def _fetch(data_set: DataSet, data_dir: Path, folder: Path) -> None:
    """Fetch files into a hidden folder first, so that none is ever there by half.

    One process at a time may do so.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as root:
            fetched = data_set.download(data_set, Path(root))
            for name in data_set.files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (fetched / name).replace(folder / name)
    except Exception as error:  # the file system, or any of several network libraries
        raise InputError(
            f"{folder}: {data_set.name} could not be fetched ({type(error).__name__}: "
            f"{escaped(str(error))}); try again, or put {', '.join(data_set.files)} there"
        ) from error


def _from_torch_geometric(data_set: DataSet, root: Path) -> Path:
    """Call torch-geometric's download of a data set, which has one class for several names."""
    with warnings.catch_warnings(action="ignore"):  # about its own code while it is imported
        from torch_geometric import datasets
    is_planetoid = data_set.read is planetoid.read
    class_ = datasets.Planetoid if is_planetoid else getattr(datasets, data_set.name)
    fetcher: Any = class_.__new__(class_)  # its __init__ would write the pickled copy
    fetcher.root, fetcher.name, fetcher.split = str(root), data_set.name, "public"
    folder = Path(fetcher.raw_dir)
    folder.mkdir(parents=True)
    fetcher.download()
    return folder


def _from_ogb(data_set: DataSet, root: Path) -> Path:
    """Fetch the archive of the Open Graph Benchmark, and unpack what is read of it."""
    with warnings.catch_warnings(action="ignore"):
        from torch_geometric.data import download_url
    stem = data_set.name.removeprefix("ogbn-")
    with zipfile.ZipFile(download_url(f"{_OGB}/{stem}.zip", str(root))) as archive:
        for name in data_set.files:
            archive.extract(f"{stem}/{name}", root)
    return root / stem


_OGB = "https://snap.stanford.edu/ogb/data/nodeproppred"
_ALL = (
    *(
        DataSet(
            name, f"{name}/raw", planetoid.file_names(name), planetoid.read, _from_torch_geometric
        )
        for name in ("Cora", "CiteSeer", "PubMed")
    ),
    DataSet("Reddit", "Reddit/raw", reddit.FILES, reddit.read, _from_torch_geometric),
    *(
        DataSet(name, f"{name}/raw", graphsaint.FILES, graphsaint.read, _from_torch_geometric)
        for name in ("Reddit2", "Flickr", "Yelp", "AmazonProducts")
    ),
    *(
        DataSet(name, name.replace("-", "_"), ogb.file_names(name), ogb.read, _from_ogb)
        for name in ogb.SPLITS
    ),
)
DATA_SETS = {data_set.name.lower(): data_set for data_set in _ALL}
