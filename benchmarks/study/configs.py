"""The layouts of the experiment, their names, and the figures published about them.

J. Raffi, "Distributed Graph Neural Network" (Pisa, 2024): the mean seconds of a mini-batch of 1,000
CIFAR-10 images on a node with two Xeon Gold 5120, 56 logical CPUs, of a block's forward and of the
readout's.
"""

import re

from vigpipe.errors import InputError
from vigpipe.parallel.layout import Layout

SEQUENTIAL = "sequential"
BATCH = 1000
STEP_SECONDS = {
    SEQUENTIAL: 37.44,
    "2x5": 19.02,
    "2x10": 25.69,
    "4x5": 28.12,
    "4x10": 29.36,
    "2x2x5": 19.19,
    "2x2x10": 25.70,
}
BLOCK_SECONDS = {"train": 1.95, "test": 1.68}
READOUT_SECONDS = 0.011

_FORMS = (
    re.compile(r"(?P<sequential>sequential)"),
    re.compile(r"accumulated-(?P<m>[0-9]{1,6})"),
    re.compile(r"(?P<s>[0-9]{1,6})x(?P<m>[0-9]{1,6})"),
    re.compile(r"(?P<d>[0-9]{1,6})x(?P<s>[0-9]{1,6})x(?P<m>[0-9]{1,6})"),
)


def parse_configs(text: str) -> dict[str, Layout]:
    """Parse a comma list of layouts into layouts by name.

    Raises:
        InputError: a word is not the name of a layout, or a name is there twice.
    """
    layouts: dict[str, Layout] = {}
    for name in (word.strip() for word in text.split(",")):
        layout = _layout(name)
        if layout is None:
            raise InputError(
                f"--configs {text}: {name!r} is not a layout; the layouts are sequential, "
                "accumulated-M (from 2 micro-batches), SxM (from 2 stages) and DxSxM (from 2 "
                "copies), such as accumulated-5, 2x5 or 2x2x5"
            )
        if name in layouts:
            raise InputError(f"--configs {text}: {name} is there twice; name every layout once")
        layouts[name] = layout
    return layouts


def _layout(name: str) -> Layout | None:
    match = next((m for form in _FORMS if (m := form.fullmatch(name))), None)
    if match is None:
        return None
    given = {key: int(value) for key, value in match.groupdict().items() if key in ("d", "s", "m")}
    layout = None
    if all(given.values()):
        layout = Layout(given.get("s", 1), given.get("m", 1), given.get("d", 1))
    # One name for each layout, without zeros in front.
    return layout if layout is not None and name_of(layout) == name else None


def name_of(layout: Layout) -> str:
    """Return the name of a layout in `--configs`."""
    copies, stages = layout.num_replicas, layout.pipeline_size
    num_microbatches = layout.num_microbatches
    if copies > 1:
        return f"{copies}x{stages}x{num_microbatches}"
    if stages > 1:
        return f"{stages}x{num_microbatches}"
    return f"accumulated-{num_microbatches}" if num_microbatches > 1 else SEQUENTIAL


def baseline(layout: Layout) -> Layout:
    """Return the baseline of a layout: the same D × M micro-batches on one stage."""
    return Layout(num_microbatches=layout.num_microbatches * layout.num_replicas)


def ceiling(layout: Layout) -> float:
    """Compute the largest possible speed-up of equal stages: D S M / (M + S - 1).

    Huang et al. 2018 (GPipe, arXiv:1811.06965): a pipeline takes M + S - 1 times the S-th part of a
    micro-batch, where its baseline takes M micro-batches.
    """
    stages, num_microbatches = layout.pipeline_size, layout.num_microbatches
    return layout.num_replicas * stages * num_microbatches / (num_microbatches + stages - 1)


def published_speedup(name: str) -> float | None:
    """Return the published speed-up over the whole mini-batch on one stage; None without one."""
    if name == SEQUENTIAL or name not in STEP_SECONDS:
        return None
    return STEP_SECONDS[SEQUENTIAL] / STEP_SECONDS[name]
