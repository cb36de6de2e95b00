"""Data sets of labelled images in the formats in which people keep them.

Each format has a file with two functions: `holds(path)` looks only at names, and tells whether a
path holds a data set of this format; `read(path)` finds its images, labels and class names without
decoding any image. What is wrong with a data set is an InputError of one sentence.
"""

import os
from pathlib import Path

from vigpipe.data.formats import arrow, folders, idx, listed, npz, parquet, tars
from vigpipe.data.stored import Stored
from vigpipe.errors import InputError

_FORMATS = (listed, idx, npz, arrow, parquet, tars, folders)  # the first that holds


def read(path: Path) -> Stored:
    """Find the images, labels and class names of a data set in a folder or a file."""
    for format_ in _FORMATS[:-1]:
        if format_.holds(path):
            return format_.read(path)
    if not os.path.isdir(path):
        raise InputError(
            f"{path}: is no data set; give a folder with train/<class>/<image> and "
            "test/<class>/<image>, one with tar files or with the files of MNIST, of parquet or of "
            "Hugging Face's save_to_disk, a .npz file, or a .csv file"
        )
    return _FORMATS[-1].read(path)  # folders of images, whose message says what is expected
