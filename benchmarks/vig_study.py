"""Benchmark vig_study on one machine: torch-geometric's formulation, plain torch, and fused."""

import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.alone import peaks, set_up, write_page
from benchmarks.options import VigStudyBench
from benchmarks.side_by_side import alternate
from vigpipe.errors import InputError
from vigpipe.model.study import NUM_BLOCKS, VigStudy
from vigpipe.model.variants import create_model
from vigpipe.selftest.compared import relative_difference

CONTENDERS = ("reference", "plain", "fused")
SIDE = 32  # height and width of the images
GB = 1e9


def _torch_geometric() -> Any:
    with warnings.catch_warnings():  # warnings about its own code while it is imported
        warnings.simplefilter("ignore")
        import torch_geometric.nn
        import torch_geometric.utils
    return torch_geometric


class _StudyGrapher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(3, 256), nn.BatchNorm1d(256))
        self.graph_conv = _torch_geometric().nn.GraphConv(256, 256)
        self.fc2 = nn.Sequential(nn.Linear(256, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.graph_conv(self.fc1(x), edges))) + x


class _StudyFFN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Sequential(nn.Linear(3, 512), nn.BatchNorm1d(512))
        self.fc2 = nn.Sequential(nn.Linear(512, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x))) + x


class _StudyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grapher, self.ffn = _StudyGrapher(), _StudyFFN()


class ReferenceStudy(nn.Module):
    """The study's model as its author has written it, in vigpipe's names of parameters.

    torch-geometric's GraphConv runs on one graph of all images' pixels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_StudyBlock() for _ in range(NUM_BLOCKS))
        self.fc1, self.fc2 = nn.Linear(3, 1024), nn.Linear(1024, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits: (B, 3, H, W) -> (B, 10)."""
        num_images, _, height, width = images.shape
        edges = _torch_geometric().utils.grid(height, width)[0]
        edges = edges[:, edges[0] != edges[1]]  # (2, E), without loops
        offsets = torch.arange(num_images).view(-1, 1, 1) * (height * width)
        edges = (edges + offsets).transpose(0, 1).flatten(1)
        x = images.flatten(2).transpose(1, 2).reshape(-1, 3)
        for block in self.blocks:
            assert isinstance(block, _StudyBlock)
            x = block.ffn(block.grapher(x, edges))
        x = x.view(num_images, -1, 3).sum(1)
        return self.fc2(F.gelu(self.fc1(x)))


def make_model(name: str) -> nn.Module:
    """Make the model in one of the formulations, all with the same weights."""
    torch.manual_seed(0)
    model = create_model(
        "vig_study",
        num_classes=10,
        img_size=(SIDE, SIDE),
        impl="plain" if name == "plain" else "fused",
    )
    assert isinstance(model, VigStudy)
    if name != "reference":
        return model
    reference = ReferenceStudy()
    reference.load_state_dict(model.state_dict())
    return reference


def make(name: str, batch_size: int, device: torch.device) -> Callable[[], Tensor]:
    """Make a training step (forward, backward, Adam), which returns the loss.

    Args:
        name: one of CONTENDERS.
        batch_size: images of the step.
        device: device to run on.
    """
    model = make_model(name).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, 3, SIDE, SIDE, generator=generator).to(device)
    labels = torch.randint(10, (batch_size,), generator=generator).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def differences(batch_size: int, name: str) -> tuple[float, float]:
    """Compare a formulation in float32 with torch-geometric's in float64.

    Returns:
        The largest difference of the logits over the largest logit, and the 2-norm of the
        difference of the whole gradient over that of the gradient.
    """
    results: list[tuple[Tensor, Tensor]] = []
    for kind, dtype in (("reference", torch.float64), (name, torch.float32)):
        model = make_model(kind).to(dtype).train()
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(batch_size, 3, SIDE, SIDE, generator=generator).to(dtype)
        labels = torch.randint(10, (batch_size,), generator=generator)
        logits = model(images)
        F.cross_entropy(logits, labels).backward()
        gradients = dict(model.named_parameters())
        flat = [gradients[key].grad.flatten() for key in sorted(gradients)]  # pyrefly: ignore[missing-attribute]
        results.append((logits.detach().double(), torch.cat(flat).double()))
    (_, truth), (_, gradient) = results
    return (
        relative_difference(results[1][0], results[0][0]),
        float((gradient - truth).norm() / truth.norm()),
    )


def bench_vig_study(config: VigStudyBench) -> None:
    """Time training steps of every batch size.

    Above --most-reference images only the fused formulation is run, because the others need too
    much memory.
    """
    device = set_up(config)
    rows: list[dict[str, object]] = []
    seconds: dict[str, list[float]] = {}
    for batch_size in _batch_sizes(config.batch_sizes):
        has_reference = batch_size <= config.most_reference
        names = CONTENDERS if has_reference else ("fused",)
        # Measured before this process has grown, because two large processes might not fit.
        memory = {
            name: peaks(make, name, batch_size, device=device.type, threads=config.threads)
            for name in names
        }
        contenders = {name: make(name, batch_size, device) for name in names}
        timings = alternate(contenders, names[0], config.repeats, device)
        del contenders
        for name in names:
            peak, added = memory[name]
            values, ratios = timings.seconds[name], timings.ratios(name)
            logits, gradient = differences(min(batch_size, config.compared), name)
            seconds[f"batch {batch_size}: {name}"] = values
            rows.append(
                {
                    "batch": batch_size,
                    "": name,
                    "s a mini-batch": _spread(values),
                    "ms an image": f"{1e3 * median(values) / batch_size:.1f}",
                    "ratio": f"{median(ratios):.2f}×" if has_reference else "–",
                    "peak of the process, GB": f"{peak / GB:.2f}",
                    "of it for the step, GB": f"{added / GB:.2f}",
                    "logits off by": f"{logits:.1e}",
                    "gradient off by": f"{gradient:.1e}",
                }
            )
    write_page(
        config.out,
        "vig_study: forward, backward and Adam",
        f"{config.threads} thread(s), float32. Reference: torch-geometric's GraphConv; plain and "
        f"fused: --impl. Off by: against torch-geometric in float64 on {config.compared} images, "
        f"largest difference of the logits and 2-norm of the whole gradient. Above "
        f"{config.most_reference} images only fused is run: the others need 0.1 GB an image.",
        rows,
        seconds,
        device,
    )


def _batch_sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--batch-sizes {text}: must be numbers of images, such as 10,100")
    return sizes


def _spread(seconds: list[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f} – {max(seconds):.2f})"
