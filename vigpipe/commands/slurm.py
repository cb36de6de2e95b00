"""The command `vigpipe slurm write`: a batch file of Slurm, to be changed and submitted."""

from pathlib import Path

from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import check_new_file, told_if_unwritable
from vigpipe.files.shipped import shipped


def write_batch_file(folder: Path, *, overwrite: bool = False) -> Path:
    """Write train.sbatch into a folder, which is made if there is none; return the file's path."""
    source = shipped("slurm") / "train.sbatch"
    target = folder / source.name
    check_new_file(target, "", (".sbatch",), overwrite=overwrite)
    with told_if_unwritable(str(target), "choose another folder"):
        write_atomically(target, source.read_text(encoding="utf-8"))
    return target
