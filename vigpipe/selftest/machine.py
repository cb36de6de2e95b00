"""What there is to test: the processor, the GPUs, and the libraries that drive them."""

import os
from dataclasses import dataclass

import torch

from vigpipe.config.choices import Device
from vigpipe.launch.device import hardware
from vigpipe.launch.environment import threads_per_rank
from vigpipe.launch.join import device_alone
from vigpipe.run.provenance import version_of


@dataclass(frozen=True)
class Gpu:
    """A GPU; its capability is such as 9.0, and its processors are streaming multiprocessors."""

    name: str
    memory_bytes: int
    capability: str
    num_processors: int


@dataclass(frozen=True)
class Machine:
    """The machine, and what of it is tested."""

    device: Device  # what is tested: cpu, or cuda where there are GPUs
    processor: str  # its name, with its number of cores
    num_threads: int  # those that a lone rank takes here
    gpus: tuple[Gpu, ...]  # none where the CPU is tested
    libraries: dict[str, str]  # versions of CUDA, cuDNN, NCCL and Triton

    @property
    def hardware(self) -> str:
        names = [gpu.name for gpu in self.gpus]
        kinds = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
        return "; ".join([*kinds, self.processor])


def look_at_machine(requested: Device) -> Machine:
    """Describe this machine; call this in a process of its own, for it opens a context on a GPU."""
    device = device_alone(requested)
    has_gpu = device.type == "cuda"
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if has_gpu else []
    return Machine(
        device="cuda" if has_gpu else "cpu",
        processor=hardware(torch.device("cpu")),
        num_threads=threads_per_rank(None, 1, os.environ),
        gpus=tuple(gpus),
        libraries=_libraries() if gpus else {},
    )


def _gpu(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    capability = f"{facts.major}.{facts.minor}"
    return Gpu(facts.name, facts.total_memory, capability, facts.multi_processor_count)


def _libraries() -> dict[str, str]:
    from torch.cuda import nccl

    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, nccl.version())),
        "Triton": version_of("triton"),
    }
