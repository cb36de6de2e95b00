"""A run in which something goes wrong at a chosen place: `python faulty.py FAULT RANKS OPTIONS...`.

FAULT is PLACE:STEP:RANK:WHAT, for example `backward:3:1:kill`. Ranks are started as `vigpipe train`
starts them; each puts the fault in place and then runs the command, of which nothing is changed.
A fault happens once, and tells the file $FAULT_DONE when; with $FAULT_AFTER it waits for that path.
RANKS may be DxS: D replicas of S ranks that the run can do without, or DxS+S with a server. It is
srun for one rank that something else has started.
"""

import os
import signal
import sys
import time
from pathlib import Path

from vigpipe.cli import main
from vigpipe.files.atomic import write_atomically
from vigpipe.launch import local
from vigpipe.launch.environment import FOLDER_VARIABLE, from_environment
from vigpipe.launch.failures import pid_file, tell_interrupted
from vigpipe.start import COMMAND_LINE


def happen(what: str) -> None:
    done = Path(os.environ["FAULT_DONE"])
    if done.exists():
        return
    while "FAULT_AFTER" in os.environ and not Path(os.environ["FAULT_AFTER"]).exists():
        time.sleep(0.01)  # until a checkpoint that is being written has its name
    write_atomically(done, f"{os.getpid()} {time.time()}")  # a test looks for it all the time
    if what == "node":  # which has all ranks of the replica
        own, size = from_environment(os.environ).rank, int(os.environ["FAULT_SIZE"])
        for other in range(own - own % size, own - own % size + size):
            if other != own:
                pid = pid_file(Path(os.environ[FOLDER_VARIABLE]), other).read_text()
                os.kill(int(pid), signal.SIGKILL)
    if what in ("kill", "node"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raise":
        raise RuntimeError("the fault of the test")
    if what == "memory":
        import torch

        torch.empty(1 << 50, dtype=torch.uint8)
    if what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "ctrl-c":
        os.killpg(0, signal.SIGINT)  # a terminal sends it to everybody


def jump() -> None:
    """Let the clock of the host go wrong by an hour, to and fro, several times a second."""
    right = time.time

    def wrong() -> float:
        now = right()
        return now + (-3600, 3600, 0)[int(now * 7) % 3]

    time.time = wrong


def put(place: str, step: int, what: str) -> None:
    import torch

    from vigpipe import ranks, start, training
    from vigpipe.checkpoint import saver
    from vigpipe.parallel import stage

    now, asked = [0], []
    train_step = training.train_step

    def counted(rank_state, batch, wishes):
        now[0] = rank_state.step + 1
        if place == "step" and now[0] >= step:
            happen(what)
        if place == "loss" and now[0] == step and batch.inputs is not None:
            batch.inputs.fill_(torch.nan)
        if place == "stop" and now[0] >= step and not asked:
            asked.append(now[0])
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(rank_state, batch, wishes)

    training.train_step = counted  # pyrefly: ignore[bad-assignment]

    def wrap(owner, name):
        before = getattr(owner, name)

        def wrapped(*args, **options):
            result = before(*args, **options)
            if now[0] >= step:  # replicas with steps of their own may leave out a number
                happen(what)
            return result

        setattr(owner, name, wrapped)

    if place == "start":
        wrap(start, "_check_options")
    if place == "data":
        wrap(ranks, "prepare")
    if place == "meeting":
        wrap(ranks, "join")
    if place == "building":  # what a rank trains
        wrap(training, "make_rank_state")
    if place == "evaluation":
        wrap(training, "take_over_merged")
    if place == "forward":
        wrap(stage.Stage, "forward_one_chunk")
    if place == "backward":
        wrap(stage.Stage, "backward_one_chunk")
    if place == "exchange":  # of ranks that share a graph
        from vigpipe.parallel.shards import Shards

        wrap(Shards, "exchange")
    if place == "all-reduce":
        from vigpipe.parallel.gradients import DoubleGradients

        reduce = DoubleGradients.reduce

        def begun(self):
            if now[0] == step:
                time.sleep(0.1)  # the other replica is in it by now
                happen(what)
            reduce(self)

        DoubleGradients.reduce = begun
    if place == "average":  # with one other replica, or with a server
        from vigpipe.replication.exchange import Exchange

        transfer = Exchange._transfer

        def transferred(self, other, *messages):
            if now[0] >= step:
                happen(what)
            transfer(self, other, *messages)

        Exchange._transfer = transferred
    if place == "stop":  # when it has been asked to, and before it has saved
        save = training.Checkpoints.save

        def saved(*args, **options):
            if asked:  # others may be quick enough for a checkpoint before
                happen(what)
            save(*args, **options)

        training.Checkpoints.save = saved
    if place == "weights":  # of the end, when all steps are done
        save_weights = training.save_run_weights

        def written_last(*args, **options):
            happen(what)
            save_weights(*args, **options)

        training.save_run_weights = written_last
    if place == "end":
        now[0] = step
        wrap(training, "share_evaluation")
    if place == "checkpoint":
        write = saver.Saver._write_file

        def written(self, path, tensors):
            write(self, path, tensors)
            if int(path.parent.name.split("-")[1]) >= step:
                happen(what)

        saver.Saver._write_file = written


def run_ahead() -> None:
    """Let a rank hand out steps before it knows the outcome of the last, as on a GPU."""
    from vigpipe.launch.device import ToHost
    from vigpipe.run import rank, step

    class Late(ToHost):
        num_looks = 0

        def has_come(self) -> bool:
            self.num_looks += 1
            return self.num_looks > 3

    rank.runs_ahead = lambda device: True
    step.ToHost = Late


def rank(arguments: list[str]) -> int:
    fault, *command = arguments
    if "FAULT_AHEAD" in os.environ:
        run_ahead()
    place, step, which, what = fault.split(":")
    if str(from_environment(os.environ).rank) == which:
        if place == "options":
            command = [what if "--lr=" in option else option for option in command]
        elif place == "clock":
            jump()
        else:
            put(place, int(step), what)
    return main(command)


if __name__ == "__main__":
    fault, num_ranks, *command = sys.argv[1:]
    if num_ranks == "srun":
        sys.exit(rank([fault, *command]))
    kept, _, server = num_ranks.partition("+")
    num_replicas, _, size = kept.partition("x")
    per_replica = int(size or 1)
    os.environ["FAULT_SIZE"] = str(per_replica)
    local.preload(COMMAND_LINE, "vigpipe.run.evaluation", "rich.progress")
    num_kept = int(num_replicas) * per_replica
    replicas = [range(r, r + per_replica) for r in range(0, num_kept if size else 0, per_replica)]
    num_ranks = num_kept + int(server or 0)
    command = [fault, *command]
    try:
        code = local.start_local(num_ranks, "__main__:rank", command, 1, replicas)
    except KeyboardInterrupt as interrupt:
        code = tell_interrupted(interrupt)
    sys.exit(code)
