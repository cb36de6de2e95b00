"""The command `vigpipe dataset`: make a graph file from what is on this machine."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import check_new_file
from vigpipe.graphs import debian

MADE_BY = "vigpipe dataset debian"  # the comment of the .npz file


def make_debian_graph(out: Path, lists: Path | None = None) -> None:
    """Write the graph of Debian's packages, and print its size.

    Args:
        out: the file to write, which ends in .npz.
        lists: folder of apt's lists of packages; by default this machine's own.

    Raises:
        InputError: there is a file that must not be replaced, it cannot be written, or there are no
            lists.
    """
    check_new_file(out, "", (".npz",), mark=MADE_BY, overwrite=None)
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
