"""The table of variants of the models of images, and what makes one by its name."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vigpipe.model.blocks import VigShape
from vigpipe.model.image import ImageModel
from vigpipe.model.mobile import MobileGnn, MobileShape
from vigpipe.model.vig import VisionGnn


def _pyramid(blocks: tuple[int, ...], channels: tuple[int, ...], **changes: Any) -> VigShape:
    published: dict[str, Any] = {
        "k": (9, 9),
        "max_dilation": 5,
        "reductions": (4, 2, 1, 1),
        "relative": True,
        "stem": (2, 1, 1),
        "stem_stride": 4,
    }
    return VigShape(blocks, channels, **(published | changes))


VIG_SHAPES = {
    "vig_ti_224": VigShape((12,), (192,)),
    "vig_s_224": VigShape((16,), (320,)),
    "vig_b_224": VigShape((16,), (640,)),
    "pvig_ti_224": _pyramid((2, 2, 6, 2), (48, 96, 240, 384)),
    "pvig_s_224": _pyramid((2, 2, 6, 2), (80, 160, 400, 640)),
    "pvig_m_224": _pyramid((2, 2, 16, 2), (96, 192, 384, 768)),
    "pvig_b_224": _pyramid((2, 2, 18, 2), (128, 256, 512, 1024)),
    "vig_cifar_ti": VigShape((8,), (128,), k=(9, 9), stem_stride=4, img_size=(32, 32)),
    "pvig_cifar_ti": _pyramid(
        (2, 2, 4, 2), (32, 64, 128, 256), max_dilation=1, stem_stride=1, img_size=(32, 32)
    ),
    "vig_digits": VigShape((4,), (48,), k=(9, 9), stem=(2, 1), stem_stride=1, img_size=(8, 8)),
}


def _mobilevig(blocks: tuple[int, int, int, int], *channels: int, hidden: int) -> MobileShape:
    *local, graph = blocks
    of_each = (*((n, 0) for n in local), (0, graph))
    return MobileShape("mobilevig", of_each, channels, hidden, (2, 2, 2, 2))


def _mobilevigv2(num: int, middle: int, *channels: int, hidden: int) -> MobileShape:
    blocks = (num, 0), (num, num), (middle, num), (num, num)
    return MobileShape("mobilevigv2", blocks, channels, hidden, (8, 8, 4, 2))


def _greedyvig(num: int, middle: int, last: int, *channels: int) -> MobileShape:
    blocks = (num, num), (num, num), (middle, num), (last, last)
    return MobileShape("greedyvig", blocks, channels, 768, (8, 4, 2, 1))


def _adaptvig(num: int, *channels: int) -> MobileShape:
    blocks = (num, num), (num, num), (3 * num, num), (num, num)
    return MobileShape("adaptvig", blocks, channels, 768, (8, 4, 2, 1))


def _logvig(num: int, middle: tuple[int, int], *channels: int, k: int = 2) -> MobileShape:
    blocks = (num, num), (num, num), middle, (num, num)
    return MobileShape("logvig", blocks, channels, 768, (k, k, 2, 2))


def _of_cifar(shape: MobileShape) -> MobileShape:
    """Make a small version for images of 32 x 32: three resolutions, of 16 x 16 nodes and fewer."""
    return replace(shape, stem_strides=(1, 2), img_size=(32, 32))


MOBILE_SHAPES = {
    "mobilevig_ti": _mobilevig((2, 2, 6, 2), 42, 84, 168, 256, hidden=512),
    "mobilevig_s": _mobilevig((3, 3, 9, 3), 42, 84, 176, 256, hidden=512),
    "mobilevig_m": _mobilevig((3, 3, 9, 3), 42, 84, 224, 400, hidden=768),
    "mobilevig_b": _mobilevig((5, 5, 15, 5), 42, 84, 240, 464, hidden=768),
    "mobilevigv2_ti": _mobilevigv2(2, 6, 32, 64, 128, 256, hidden=512),
    "mobilevigv2_s": _mobilevigv2(3, 9, 32, 64, 128, 256, hidden=512),
    "mobilevigv2_m": _mobilevigv2(3, 9, 32, 64, 192, 384, hidden=512),
    "mobilevigv2_b": _mobilevigv2(3, 9, 64, 128, 256, 512, hidden=768),
    "greedyvig_s": _greedyvig(2, 6, 2, 48, 96, 192, 384),
    "greedyvig_m": _greedyvig(3, 9, 3, 56, 112, 224, 448),
    "greedyvig_b": _greedyvig(4, 12, 3, 64, 128, 256, 512),
    "adaptvig_s": _adaptvig(3, 32, 64, 128, 256),
    "adaptvig_m": _adaptvig(4, 48, 96, 192, 320),
    "adaptvig_b": _adaptvig(5, 48, 96, 192, 384),
    "logvig_ti": _logvig(3, (9, 3), 32, 64, 128, 224, k=3),
    "logvig_s": _logvig(5, (15, 5), 32, 64, 128, 256),
    "logvig_b": _logvig(5, (18, 6), 48, 96, 192, 384),
    "mobilevigv2_cifar_ti": _of_cifar(
        MobileShape("mobilevigv2", ((2, 0), (2, 2), (2, 2)), (48, 96, 192), 512, (4, 4, 2))
    ),
    "greedyvig_cifar_ti": _of_cifar(
        MobileShape("greedyvig", ((1, 1), (2, 2), (1, 1)), (48, 96, 192), 512, (4, 2, 1))
    ),
}

# Those of ViG come first.
SHAPES: Mapping[str, VigShape | MobileShape] = ChainMap[str, Any](MOBILE_SHAPES, VIG_SHAPES)


def make_variant(name: str, *sizes: Any, **options: Any) -> ImageModel:
    """Make a variant's model, with the arguments that its class takes after the shape."""
    shape = SHAPES[name]
    make = MobileGnn if isinstance(shape, MobileShape) else VisionGnn
    return make(shape, *sizes, **options)  # pyrefly: ignore[bad-argument-type]
