"""Images with labels: where they come from and how they are read."""

from vigpipe.data.sources import Source, Split, open_source

__all__ = ["Source", "Split", "open_source"]
