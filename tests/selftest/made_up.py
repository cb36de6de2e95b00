"""A self-test of eight GPUs, as nobody has run it, from made-up measurements."""

from vigpipe.selftest import checks, faults, links, operators, run, speed
from vigpipe.selftest.command import Finished
from vigpipe.selftest.machine import Gpu, Machine
from vigpipe.selftest.page import PartResult, Result
from vigpipe.selftest.rows import Row
from vigpipe.selftest.way import Prepared

CPU = Machine("cpu", "Some processor, 2 cores", 2, (), {})
H200 = Gpu("NVIDIA H200", 150_110_011_392, "9.0", 132)
LIBRARIES = {"CUDA": "13.2", "cuDNN": "91500", "NCCL": "2.29.1", "Triton": "3.9.0"}

CHECKED = """vig_cifar_ti on fake, 2 replicas × 4 stages, 2 micro-batches, gpipe, float64
against the unsplit model in one process on the same 4 micro-batches, 2 steps; wanted: 1e-10

                    largest difference    relative    bit for bit    in
------------------  --------------------  ----------  -------------  ----
loss                0                     0           yes
gradients           1e-16                 {gradients}     no             x (step 1)
weights             3e-17                 4e-16       no             y
running statistics  0                     0           yes
"""


def machine(num_gpus):
    return Machine("cuda", "Some processor, 16 cores", 16, (H200,) * num_gpus, LIBRARIES)


def operator_rows():
    triton, plain = "Triton (compiled at first use)", "plain torch"
    yield operators.row_of("knn", operators.Compared("4 × 196 nodes", triton, 3e-7, None, 2e-5))
    yield operators.row_of("knn", operators.Compared("ties, 37 nodes", triton, 12.0, None, 0.0))
    yield operators.row_of("aggregate", operators.Compared("max", triton, 0.0, 6e-8, 2e-5))
    yield operators.row_of("aggregate", operators.Compared("max", plain, 0.0, 5e-8, 2e-5))
    yield operators.row_of(
        "norm", operators.Compared("8 × 196", f"{plain} (torch's own kernels)", 3e-7, 2e-7, 2e-5)
    )
    yield Row("hidden", "skipped", note="not begun: of its share of the budget 4 s were left")


def check_rows(num_gpus):
    for index, (what, words) in enumerate(checks.commands(machine(num_gpus))):
        stdout = CHECKED.format(gradients="2e-16" if index != 7 else "3e-02")
        yield checks.read(what, words, Finished(int(index == 7), stdout, "", 14.0 + index))


def link_rows(num_gpus):
    for ranks in (2, 4, num_gpus):
        for operation, factor in (("all-reduce", 2 * (ranks - 1) / ranks), ("send/recv", 1.0)):
            for num_bytes in links.SIZES:
                seconds = 9e-6 + num_bytes / 3.6e11
                values = {
                    "operation": operation,
                    "ranks": ranks,
                    "bytes": num_bytes,
                    "seconds": seconds,
                    "algorithm_bandwidth": num_bytes / seconds,
                    "bus_bandwidth": factor * num_bytes / seconds,
                }
                yield links.row_of(values)


def fault_rows(num_gpus):
    killed, frozen = faults.faults(machine(num_gpus))
    seen = {"code": 137, "expected": 137, "seconds": 3.2, "step": 11, "resumed": True}
    told = "vigpipe: rank 1 was ended by SIGKILL; out of memory?"
    yield faults.judge(killed, {**seen, "told": told, "checkpoint": "step-00000010"})
    seen |= {"code": 134, "expected": 70, "seconds": 34.0, "checkpoint": "step-00000010"}
    yield faults.judge(frozen, {**seen, "told": "Watchdog caught collective operation timeout"})


def profile_rows():
    values = {"model": "vig_ti_224", "dtype": "bfloat16", "batch_size": 128}
    yield Row("step", "measured", {**values, "step_seconds": 0.0417, "peak_bytes": 5.4e9})
    for i in range(60):
        name = f"void at::native::vectorized_elementwise_kernel<{i}, at::native::CUDAFunctor_add<c>"
        name = "_knn_kernel" if i == 0 else f"{name}, std::array<char*, 3ul> >(int, Functor)"
        seconds = 0.009 * 0.75**i
        kernel = {"calls": 12.0 + i, "seconds": seconds, "share": seconds / 0.0417}
        yield Row(name, "measured", kernel)


def speed_rows():
    for model, ways in speed.models(machine(1)).items():
        for mode in speed.MODES:
            entries = [entry for entry in speed.entries_of(ways) if entry.mode == mode]
            for i, entry in enumerate(entries):
                base = {"bfloat16": 0.12, "tf32": 0.2, "float32": 0.35}[entry.way.precision]
                base /= 2.9 if entry.way.formulation == "ours" else 1
                base /= 1.6 if entry.way.compiled else 1
                entry.seconds = [base * (1 + 0.01 * turn) for turn in range(5)]
                logits = [[0.1 + 1e-4 * i, 0.2]] if mode == "inference" else []
                entry.prepared = Prepared(40.0 * entry.way.compiled + 1, base, 2e10 * base, logits)
            if model == "pvig_s_224":
                entries[2].give_up("failed", "OutOfMemoryError: CUDA out of memory")
            yield from speed.rows_of(model, 128, entries)


def result(num_gpus=8):
    rows = {
        "operators": operator_rows(),
        "check": check_rows(num_gpus),
        "links": link_rows(num_gpus),
        "faults": fault_rows(num_gpus),
        "profile": profile_rows(),
        "speed": speed_rows(),
    }
    parts = [PartResult(part, list(rows[part.name]), 60.0) for part in run.PARTS]
    facts = {
        "command": "vigpipe selftest --out DIR",
        "date": "2026-11-23",
        "warm_up": run.WARM_UP,
        "versions": {"vigpipe": "0.1.0", "torch": "2.11.0"},
        "commit": "0" * 40,
        "host": "some-host",
    }
    return Result(machine(num_gpus), facts, parts, 600.0, 571.2)
