"""Whether the steps of a run are recorded as a CUDA graph, and how its gradients are added up."""

import torch

from vigpipe.config.choices import Sync
from vigpipe.errors import InputError
from vigpipe.launch.device import default_sync
from vigpipe.run.facts import Run


def sync_of(run: Run, device: torch.device) -> Sync:
    """Return how gradients are added up over replicas (--sync), by default by the device."""
    layout, config = run.layout, run.config
    degrees = layout.pipeline_size, layout.world_size, config.cuda_graph, layout.num_shards
    return config.sync or default_sync(device, *degrees)


def is_recorded(run: Run, sync: Sync, *, on_gpu: bool, is_timed: bool) -> bool:
    """Decide whether steps are recorded as a CUDA graph; InputError if they must be and cannot."""
    layout, config = run.layout, run.config
    if config.cuda_graph is False:
        return False
    not_recorded = run.job.why_not_recorded(layout)
    why_not = {
        "a graph runs on a GPU, and this rank computes on the CPU": not on_gpu,
        f"stages that wait for one another cannot be recorded, and --stages is "
        f"{layout.pipeline_size}": layout.pipeline_size > 1,
        f"--sync {sync} does more in a backward than a graph may; choose drain": sync != "drain",
        not_recorded or "": not_recorded is not None,
        "a recorded step has no parts that could be timed": is_timed,
        "--detect-anomaly looks at numbers, which a graph does not show": config.detect_anomaly,
    }
    reason = next((reason for reason, holds in why_not.items() if holds), None)
    if config.cuda_graph is None:
        untried = layout.world_size > 1 or config.compile or run.autocast_dtype == torch.float16
        return reason is None and not untried
    if reason is not None:
        raise InputError(f"--cuda-graph: {reason}; change that, or leave it out")
    return True
