"""Benchmark the way of images from JPEG files to batches on the device against timm's loader."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate

from benchmarks.alone import set_up
from benchmarks.effort import Effort, measure
from benchmarks.hidden import NUM_STEPS, Steps, measure_steps
from benchmarks.loaders import CROP_PCT, SIDE, Loader, Reading, TimmLoader, VigpipeLoader
from benchmarks.options import FILES, FeedBench
from benchmarks.photographs import make_pictures
from vigpipe.errors import InputError
from vigpipe.launch.environment import threads_per_rank
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import origin

VIGPIPE, PREFETCHER, NO_PREFETCHER = "vigpipe", "timm", "timm, no prefetcher"
TIMM = (PREFETCHER, NO_PREFETCHER)
TRANSFORMS = {"training": True, "evaluation": False}  # whether it augments
MOST_WORKERS = 256
NUM_WARMUP = 1  # rounds that are not timed, in which the workers start


@dataclass(frozen=True)
class Rounds:
    """What reading has cost with one transform."""

    efforts: Mapping[str, Sequence[Effort]]  # by contender, in the order of the rounds
    num_images: int  # that each contender reads in a round

    def images_a_core(self, name: str) -> list[float]:
        """Compute how many images a contender reads in a second of CPU time, round by round."""
        return [self.num_images / effort.cpu_seconds for effort in self.efforts[name]]

    @property
    def faster_timm(self) -> str:
        """Which of timm's two ways reads more images in a second of CPU time."""
        return max(TIMM, key=lambda name: median(self.images_a_core(name)))

    def ratios(self, name: str) -> list[float]:
        """Compute the images a core over those of timm's faster way, round by round."""
        pairs = zip(self.images_a_core(name), self.images_a_core(self.faster_timm), strict=True)
        return [value / reference for value, reference in pairs]

    def verdict(self, transform: str) -> str:
        """Say in a line whether vigpipe reads at least as many images as timm."""
        ratios = self.ratios(VIGPIPE)
        is_reached = median(ratios) >= 1
        return (
            f"{transform}: {median(ratios):.2f}× timm's images a core ({min(ratios):.2f} – "
            f"{max(ratios):.2f}), {'at least' if is_reached else 'below'} 1.0×"
        )

    def rows(self, transform: str) -> list[dict[str, str]]:
        """Make the rows of a table, one for each contender."""
        return [
            {
                "transform": transform,
                "": name,
                "images/s a core": f"{median(self.images_a_core(name)):.1f}",
                "ratio": _spread(self.ratios(name), "×"),
                "ms of CPU an image: workers": self._milliseconds(name, "worker_cpu_seconds"),
                "this process": self._milliseconds(name, "rank_cpu_seconds"),
                "images/s": f"{self.num_images / median(e.seconds for e in efforts):.1f}",
            }
            for name, efforts in self.efforts.items()
        ]

    def _milliseconds(self, name: str, quantity: str) -> str:
        seconds = median(getattr(effort, quantity) for effort in self.efforts[name])
        return f"{1e3 * seconds / self.num_images:.2f}"


def bench_feed(config: FeedBench) -> None:
    """Run `python -m benchmarks feed`: read beside timm, then train with and without workers.

    Raises:
        InputError: an option is out of range, or there are too few pictures.
    """
    num_batches = _batches_of_a_round(config)
    device = set_up(config)
    if not config.pictures.exists():
        print(f"{config.pictures}: {config.images} pictures are made from scikit-learn's")
        make_pictures(config.pictures, config.images)
    kilobytes = _read_once(config) / 1e3
    results, differences = {}, 0.0
    for transform, is_training in TRANSFORMS.items():
        reading = Reading(config.pictures, is_training, config.batch_size, config.workers, device)
        loaders = {
            VIGPIPE: VigpipeLoader(reading),
            PREFETCHER: TimmLoader(reading, prefetcher=True),
            NO_PREFETCHER: TimmLoader(reading, prefetcher=False),
        }
        if not is_training:
            differences = largest_difference(loaders)
        results[transform] = read_in_turn(loaders, num_batches, config, device)
        for loader in loaders.values():
            loader.close()
    steps = measure_steps(config, device)
    num_cores = threads_per_rank(None, 1, {})
    text = (
        f"{config.images} images of {config.pictures} ({kilobytes:.0f} KB a file on average), from "
        f"the file to normalised float32 batches of {config.batch_size} images of {SIDE}×{SIDE} on "
        f"the device, with {config.workers} worker(s) for each contender on {num_cores} core(s). "
        f"Training: random box, mirroring, RandAugment and erasing as published for ImageNet; "
        f"evaluation: {CROP_PCT} of the bicubically resized image. All contenders read the same "
        "images in the same order, from files that the system has in memory. Images/s a core: "
        "images over the CPU time of this process and its workers. Ratio: to the faster of timm's "
        "two ways. timm's workers are forks of this process, so they keep freed memory as it does, "
        "which timm by itself does not ask for. The images of evaluation differ from timm's by at "
        f"most {differences:.1e}, where two neighbouring greys are {2 / 255:.1e} apart."
    )
    _write(config.out, text, results, steps, device)


def _batches_of_a_round(config: FeedBench) -> int:
    for flag, value, most in (
        ("--batch-size", config.batch_size, 1 << 16),
        ("--workers", config.workers, MOST_WORKERS),
    ):
        if not 1 <= value <= most:
            raise InputError(f"{flag} {value}: must be a number from 1 to {most}")
    num_rounds = NUM_WARMUP + config.repeats
    num_batches = config.images // config.batch_size // max(1, num_rounds)
    if num_batches == 0:
        raise InputError(
            f"--images {config.images}: must be at least {num_rounds * config.batch_size}, for a "
            f"batch of {config.batch_size} in each of {num_rounds} rounds; read more images, or "
            "choose fewer --repeats or a smaller --batch-size"
        )
    return num_batches


def _read_once(config: FeedBench) -> float:
    """Read every file, so that nobody waits for the disk later, and return their mean size.

    Returns:
        Bytes of a file.

    Raises:
        InputError: there are fewer images than are to be read.
    """
    stored = Reading(config.pictures, False, 1, 1, torch.device("cpu")).open().stored
    assert stored is not None
    images = stored.train
    if len(images) < config.images:
        raise InputError(
            f"--pictures {config.pictures}: has {len(images)} training images, fewer than --images "
            f"{config.images}; read fewer, or name a folder that does not exist, to be made"
        )
    names = [images.load.name_of(i) for i in range(len(images))]
    return sum(len(Path(name).read_bytes()) for name in names) / len(names)


def largest_difference(loaders: Mapping[str, Loader]) -> float:
    """Compute the largest difference of the loaders' first batches.

    Raises:
        RuntimeError: the labels differ, so that the images are not the same.
    """
    first = {name: next(iter(list(loader.read(range(1))))) for name, loader in loaders.items()}
    images, labels = first[VIGPIPE]
    for name, (_, others) in first.items():
        if not torch.equal(labels, others.cpu()):
            raise RuntimeError(f"{name} read other images than {VIGPIPE}")
    return max(float((images - others).abs().max()) for others, _ in first.values())


def read_in_turn(
    loaders: Mapping[str, Loader], num_batches: int, config: FeedBench, device: torch.device
) -> Rounds:
    """Let all contenders read some batches, then all of them the next ones, and so on.

    Args:
        loaders: by contender.
        num_batches: of a round.
        config: the options.
        device: where batches arrive.
    """
    efforts: dict[str, list[Effort]] = {name: [] for name in loaders}
    for round_index in range(NUM_WARMUP + config.repeats):
        steps = range(round_index * num_batches, (round_index + 1) * num_batches)
        first = round_index % len(loaders)  # or whoever comes first would always be the same
        for name in (*list(loaders)[first:], *list(loaders)[:first]):

            def read(loader: Loader = loaders[name], steps: range = steps) -> None:
                for _ in loader.read(steps):
                    pass

            effort = measure(read, device)
            if round_index >= NUM_WARMUP:
                efforts[name].append(effort)
    return Rounds(efforts, num_batches * config.batch_size)


def _write(
    out: Path | None,
    text: str,
    results: Mapping[str, Rounds],
    steps: Steps,
    device: torch.device,
) -> None:
    """Print both tables, write them to README.md, and write every round to rows.csv."""
    folder = make_output_folder(out, FILES)
    rows = [row for transform, rounds in results.items() for row in rounds.rows(transform)]
    verdicts = "\n".join(f"- {rounds.verdict(name)}" for name, rounds in results.items())
    about_steps = (
        f"{steps.model} on images of {steps.side}×{steps.side} with the transform of training; "
        f"each repeat is {NUM_STEPS} steps in the midst of others."
    )
    parts = (text, rows, verdicts, about_steps, steps.rows(), steps.explain())
    for fmt in ("simple", "github"):
        page = "\n\n".join(
            part if isinstance(part, str) else tabulate(part, "keys", fmt, disable_numparse=True)
            for part in parts
        )
        if fmt == "simple":
            print(f"{page}\n")
            continue
        (folder / "README.md").write_text(
            f"# From JPEG files to batches on the device\n\n{page}\n\n{origin(device)}- warm-up: "
            f"{NUM_WARMUP} round; contenders alternate, and each round begins with another; every "
            "round is in rows.csv; figures are medians (least – most), ratios are taken round "
            "by round\n",
            encoding="utf-8",
        )
    everything = {name: (rounds.efforts, rounds.num_images) for name, rounds in results.items()}
    everything["steps"] = (steps.efforts, NUM_STEPS * steps.batch_size)
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        names = ("seconds", "rank_cpu_seconds", "worker_cpu_seconds")
        table.writerow(["part", "contender", "round", "images", *names])
        table.writerows(
            [part, name, i, num_images, *asdict(effort).values()]
            for part, (by_name, num_images) in everything.items()
            for name, efforts in by_name.items()
            for i, effort in enumerate(efforts)
        )
    print(f"{folder}/README.md, rows.csv")


def _spread(values: Sequence[float], unit: str) -> str:
    return f"{median(values):.2f}{unit} ({min(values):.2f} – {max(values):.2f})"
