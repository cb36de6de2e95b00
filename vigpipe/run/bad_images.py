"""Find the images that cannot be read, each rank a share of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from vigpipe.data.images import find_bad_images
from vigpipe.parallel.agreement import all_gather_values, run_with_heartbeats

Item = TypeVar("Item")


def find_bad_images_together(
    load: Callable[[Item], object], share: Sequence[Item], world_size: int
) -> frozenset[Item]:
    """Decode images, each rank its share; return the unreadable ones of all, to all ranks."""
    bad = run_with_heartbeats(lambda: list(find_bad_images(load, share)), world_size)
    return frozenset(image for images in all_gather_values(bad, world_size) for image in images)
