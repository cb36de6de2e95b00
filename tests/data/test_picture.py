import numpy as np
import pytest

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
    np.testing.assert_array_equal(to_array(image), pixels)
    for picture in (pixels, image):
        out = np.zeros((shape[2], *shape[:2]), dtype=np.uint8)
        write_channels(picture, out)
        np.testing.assert_array_equal(out, pixels.transpose(2, 0, 1))
