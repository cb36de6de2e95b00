"""The version of vigpipe, as in pyproject.toml."""

__version__ = "0.1.0"
