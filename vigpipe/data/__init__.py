"""Images with labels: their sources, how they are read, augmented and cut into batches."""

from vigpipe.data.augment import Augmentation
from vigpipe.data.sources import Source, Split, open_source

__all__ = ["Augmentation", "Source", "Split", "open_source"]
