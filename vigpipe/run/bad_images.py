"""Find the images that cannot be read, each rank a share of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vigpipe.data.images import find_bad_images
from vigpipe.parallel.agreement import all_gather_values, run_with_heartbeats


def find_bad_images_together(
    list_share: Callable[[], Sequence[Path]], world_size: int
) -> frozenset[Path]:
    """Decode every image once and tell all ranks which ones fail; all ranks call this.

    Args:
        list_share: lists the images that this rank is to decode. It is called beside heartbeats,
            because listing a large folder takes long as well.
        world_size: number of ranks.

    Returns:
        The unreadable images of all shares.
    """
    bad = run_with_heartbeats(lambda: list(find_bad_images(list_share())), world_size)
    return frozenset(path for paths in all_gather_values(bad, world_size) for path in paths)
