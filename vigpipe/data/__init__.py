"""Images with labels: where they come from and how they are read."""

from vigpipe.data.augment import Augmentation
from vigpipe.data.sources import Source, Split, open_source

__all__ = ["Augmentation", "Source", "Split", "open_source"]
