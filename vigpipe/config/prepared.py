"""What a prepared folder of a graph decides instead of the defaults of options."""

import os

MANIFEST = "manifest.json"
OF_FOLDER = ("features", "symmetric", "partition", "parts")  # options


def is_prepared(data: str) -> bool:
    """Whether --data names a prepared folder, which has a manifest."""
    return os.path.isfile(os.path.join(os.path.expanduser(data), MANIFEST))
