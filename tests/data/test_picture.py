import numpy as np
import pytest
from PIL import Image

from vigpipe.data.picture import size_of, to_array, to_pil, write_channels

SHAPES = [(1, 1, 1), (1, 1, 3), (5, 7, 1), (5, 7, 3), (1, 9, 1), (9, 1, 3)]


def noise(shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_and_pillows_image_hold_the_same_pixels(shape):
    pixels = noise(shape)
    image = to_pil(pixels)
    assert image.mode == {1: "L", 3: "RGB"}[shape[2]]
    assert size_of(image) == size_of(pixels) == shape[:2]
    back = to_array(image)
    assert back.shape == shape
    assert (back == pixels).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_both_are_written_channel_by_channel(shape):
    pixels = noise(shape)
    for picture in (pixels, to_pil(pixels)):
        out = np.zeros((shape[2], *shape[:2]), dtype=np.uint8)
        write_channels(picture, out)
        for channel in range(shape[2]):
            assert (out[channel] == pixels[:, :, channel]).all()


def test_what_needs_no_change_is_not_copied():
    pixels, image = noise((4, 4, 3)), Image.new("RGB", (4, 4))
    assert to_array(pixels) is pixels
    assert to_pil(image) is image
