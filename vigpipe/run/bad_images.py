"""Find the images that cannot be read, each rank a share of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from vigpipe.data.images import find_bad_images
from vigpipe.parallel.agreement import run_with_heartbeats
from vigpipe.parallel.values import all_gather_values

Item = TypeVar("Item")


def find_bad_images_together(
    load: Callable[[Item], object], images: Sequence[Item], share: Sequence[int], world_size: int
) -> frozenset[Item]:
    """Decode images, each rank those with some numbers; return all unreadable ones, to all."""

    def load_number(number: int) -> object:
        return load(images[number])

    bad = run_with_heartbeats(lambda: list(find_bad_images(load_number, share)), world_size)
    return frozenset(images[n] for of_rank in all_gather_values(bad, world_size) for n in of_rank)
