"""ogbn-arxiv and ogbn-products, in the compressed tables of the Open Graph Benchmark.

Source: Hu, Fey, Zitnik, Dong, Ren, Liu, Catasta, Leskovec, Open Graph Benchmark: Datasets for
Machine Learning on Graphs, NeurIPS 2020 (arXiv 2005.00687); read as ogb's NodePropPredDataset.
"""

import gzip
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, first_few
from vigpipe.files.untrusted import opened
from vigpipe.graphs.formats.checked import make_graph, make_split
from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION, Graph

SPLITS = {"ogbn-arxiv": "time", "ogbn-products": "sales_ranking"}  # how the nodes were split
_RAW = "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz"
_PARTS = {"train": TRAIN, "valid": VALIDATION, "test": TEST}
_MOST_NUMBERS = 1 << 28  # in a table; the features of ogbn-products are 245 million
_MOST_LINE = 1 << 20


def file_names(name: str) -> tuple[str, ...]:
    """Return the paths of the files that `read` reads, in the folder of the data set."""
    return (*_RAW, *(f"split/{SPLITS[name]}/{part}.csv.gz" for part in _PARTS))


def read(name: str, folder: Path) -> Graph:
    """Read a graph; as in ogb, edges of ogbn-products go both ways.

    A folder of another name may have any one folder of files in split/.
    """
    edges, features, labels = (
        _table(folder / file, dtype)
        for file, dtype in zip(_RAW, (np.int64, np.float32, np.int64), strict=True)
    )
    for path, table, width in ((_RAW[0], edges, 2), (_RAW[2], labels, 1)):
        if table.shape[1] != width:
            raise InputError(
                f"{folder / path}: has {table.shape[1]} columns, expected {width}; fetch it again"
            )
    sources, targets = edges.T
    if name == "ogbn-products":
        sources, targets = np.concatenate((sources, targets)), np.concatenate((targets, sources))
    return make_graph(
        name=name,
        where=str(folder),
        edges=(sources, targets),
        features=features,
        labels=labels[:, 0],
        split=make_split(_parts(_split_of(name, folder), folder), len(labels)),
    )


def holds(folder: Path) -> bool:
    """Whether a folder is laid out so."""
    return os.path.isfile(folder / _RAW[0])


def _split_of(name: str, folder: Path) -> str:
    if name in SPLITS:
        return SPLITS[name]
    try:
        found = sorted(entry.name for entry in os.scandir(folder / "split") if entry.is_dir())
    except OSError:
        found = []
    if len(found) != 1:
        raise InputError(
            f"{folder / 'split'}: has the folders {first_few(found) or 'none'}, expected one, with "
            "train.csv.gz, valid.csv.gz and test.csv.gz; leave only that one there"
        )
    return found[0]


def _parts(split: str, folder: Path) -> Iterator[tuple[int, np.ndarray, str]]:
    for name, part in _PARTS.items():
        path = folder / "split" / split / f"{name}.csv.gz"
        yield part, _table(path, np.int64).ravel(), f"{path}:"


def _table(path: Path, dtype: type) -> np.ndarray:
    try:
        with opened(path) as file, gzip.open(file) as content, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns of an empty table
            table = np.loadtxt(_lines(content, path), dtype, comments=None, delimiter=",", ndmin=2)
    except InputError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise InputError(
            f"{path}: is not a compressed table of numbers ({escaped(str(error))}); fetch it again"
        ) from error
    if not table.size:
        raise InputError(f"{path}: is empty; fetch it again")
    return table


def _lines(content: gzip.GzipFile, path: Path) -> Iterator[bytes]:
    num_numbers = 0
    while line := content.readline(_MOST_LINE):
        num_numbers += line.count(b",") + 1
        if num_numbers > _MOST_NUMBERS:
            raise InputError(
                f"{path}: has more than {_MOST_NUMBERS} numbers, which no such file has; fetch it "
                "again"
            )
        yield line
