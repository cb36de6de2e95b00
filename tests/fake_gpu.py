"""A GPU that is not there: a rank's steps on fake CUDA tensors, on a machine without one.

torch's FakeTensorMode runs every operator on shapes alone. A number that the host would have to
read has no value then, so reading it raises `DataDependentOutputException`; what else makes a host
wait for a GPU, or would end in an error there, `Watch` records.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from vigpipe.config.options import TrainConfig
from vigpipe.data.pixels import Pixels
from vigpipe.data.split import Split
from vigpipe.parallel.agreement import Agreement, Peers, Status
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.split import StageModule
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState, make_rank_state

GPU = torch.device("cuda", 0)


@dataclass
class Seen:
    """What happened between host and GPU.

    Attributes:
        sent: copies to the GPU that do not wait: from pinned memory, and asked not to.
        waited: copies, in either direction, that wait.
        fetched: times that numbers were sent to the host, to be read later.
        on_gpu: collectives on tensors of the GPU.
        on_host: collectives on tensors of the host.
        operators: operators on tensors of the GPU.
    """

    sent: int = 0
    waited: list[str] = field(default_factory=list)
    fetched: int = 0
    on_gpu: list[str] = field(default_factory=list)
    on_host: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)


def is_on_gpu(tensor: object) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"


class Watch(TorchDispatchMode):
    """Records what happens, and lets autograd run on fake CUDA tensors.

    Autograd's engine would ask the driver for the streams of CUDA tensors, so it is told that these
    are on the meta device. Where it then makes a tensor like one of them, that becomes a CUDA
    tensor again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.pinned = Seen(), set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.ops.prim.device.default and is_on_gpu(args[0]):
            return torch.device("meta")
        device = options.get("device")
        if isinstance(device, torch.device) and device.type == "meta":
            options["device"] = GPU
        result = func(*args, **options)
        inputs = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        self._note(str(func), inputs, options, result)
        return result

    def _note(self, name: str, inputs: list[Tensor], options: dict[str, Any], result: Any) -> None:
        kind, operator = name.split(".")[:2]
        places = {is_on_gpu(t) for t in inputs}
        if True in places:
            self.seen.operators.append(f"{kind}.{operator}")
        if kind == "c10d":
            (self.seen.on_gpu if places == {True} else self.seen.on_host).append(operator)
        if operator in ("_to_copy", "copy_"):
            places |= {is_on_gpu(t) for t in tree_leaves(result)}
            if places == {True, False}:
                if options.get("non_blocking") and id(inputs[-1]) in self.pinned:
                    self.seen.sent += 1
                else:
                    self.seen.waited.append(f"{name} of {tuple(inputs[-1].shape)}")


class FakeGpu:
    """One rank of a world whose other ranks do nothing, on a GPU that is not there.

    It cannot be undone: use it in a process of its own.

    Args:
        config: what to train.
        rank: position in the world.
    """

    def __init__(self, config: TrainConfig, rank: int = 0) -> None:
        # The streams that autograd's engine asks for are those of another accelerator now, which
        # has none.
        _setup_privateuseone_for_python_backend("absent")
        torch._C._ensureCUDADeviceGuardSet()
        self.mode, self.watch = FakeTensorMode(allow_non_fake_inputs=True), Watch()
        self.config, self.rank = config, rank
        run = prepare(config, torch.float32)
        if run.layout.world_size > 1:
            dist.init_process_group(
                "fake", rank=rank, world_size=run.layout.world_size, store=FakeStore()
            )
        with self._pretending(), self.mode:
            self.rank_state: RankState = make_rank_state(run, rank, GPU)
        self.rank_state.feed._beside = self  # pyrefly: ignore[missing-attribute]

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Do what is to be done on a stream of its own, and record it."""
        with self.mode, self.watch:
            return work()

    def batch(self, step: int) -> tuple[ReplicaBatch, Seen]:
        """Read this rank's share of a step, and record what reading it asks of the GPU."""
        with self._pretending():
            self.watch.seen = seen = Seen()
            item = step * self.config.dp + self.rank_state.mesh.replica_index
            return self._fake(self.rank_state.feed.batch(item)), seen

    def test_batches(self, num_images: int) -> tuple[list[ReplicaBatch], Seen]:
        """Read this rank's share of the first test images, likewise."""
        with self._pretending():
            self.watch.seen = seen = Seen()
            sharing = self.rank_state.scorers.size, self.rank_state.scorers.rank
            found = self.rank_state.feed.test_batches(("test",), *sharing, num_images)
            return [self._fake(batch) for batch in found], seen

    @contextmanager
    def running(self) -> Iterator[Seen]:
        """Run on the GPU what is inside, and record it."""
        self.watch.seen = Seen()
        with self._pretending(), self.mode, self.watch:
            yield self.watch.seen

    def _fake(self, batch: ReplicaBatch) -> ReplicaBatch:
        """Make the tensors of the host fake ones as well."""
        labels = None if batch.labels is None else self.mode.from_tensor(batch.labels)
        return replace(batch, keys=self.mode.from_tensor(batch.keys), labels=labels)

    @contextmanager
    def _pretending(self) -> Iterator[None]:
        """Replace what needs a driver."""
        seen, pinned, make_generator = self.watch.seen, self.watch.pinned, torch.Generator

        class Outcome:
            """The outcome of a step that is taken, or of an evaluation."""

            def __init__(self, values: Tensor) -> None:
                assert is_on_gpu(values)
                seen.fetched += 1
                self.num_values = len(values)

            def has_come(self) -> bool:
                return True

            def read(self) -> list[float]:
                return [1.0] * self.num_values

        def agree(status: Status, peers: Peers, *_: Any, **__: Any) -> Agreement:
            seen.on_host.append("agree")
            return Agreement([status] * peers.size)

        def pin(tensor: Tensor) -> Tensor:
            assert not is_on_gpu(tensor)
            pinned.add(id(tensor))
            return tensor

        decode_images = _without_fakes(Split.decode)

        def decode(*args: Any) -> Pixels:
            images, erasures = decode_images(*args)
            return Pixels(self.mode.from_tensor(images), erasures)

        with ExitStack() as stack:
            for name, new in {
                "vigpipe.run.step.ToHost": Outcome,
                "vigpipe.run.step.agree": agree,
                "vigpipe.run.evaluation.ToHost": Outcome,
                "vigpipe.run.evaluation.agree": agree,
                "vigpipe.run.rank.make_clock": lambda device: NoClock(),
                "vigpipe.launch.device.torch.cuda.Stream": lambda device: None,
                "torch.Generator": lambda device=None: make_generator(),  # of timm's average
                # torch's stages keep the state of the GPU's generator, once before the first step.
                "torch.random.fork_rng": lambda *_, **__: nullcontext(),
            }.items():
                stack.enter_context(patch(name, new))
            for owner, name, new in (
                (Tensor, "pin_memory", pin),
                (Tensor, "is_pinned", lambda tensor: id(tensor) in pinned),
                (FakeTensor, "is_cuda", property(is_on_gpu)),
                (FakeTensor, "is_meta", property(lambda _: False)),
                # A model is built on the CPU, where numbers are read, and images are decoded there.
                (Split, "decode", decode),
                (Run, "build", _without_fakes(Run.build)),
                (Run, "rates", _without_fakes(Run.rates)),
                (StageModule, "to", lambda module, device: self._moved(module, device)),
            ):
                stack.enter_context(patch.object(owner, name, new, create=True))
            yield

    def _moved(self, module: nn.Module, device: torch.device) -> nn.Module:
        assert device == GPU
        with self.mode:
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = torch.empty_like(buffer, device=device)
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        values = torch.empty_like(parameter, device=device)
                        part._parameters[name] = nn.Parameter(values)
        return module


def _without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with unset_fake_temporarily(), _disable_current_modes():
            return function(*args)

    return call


class NoClock:
    """A clock that stands still."""

    def stamp(self) -> float:
        return 0.0

    mark = stamp

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def seconds(self, stamp: float) -> float:
        return stamp

    def between(self, first: float, last: float) -> float:
        return last - first
