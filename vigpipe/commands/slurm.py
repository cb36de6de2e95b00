"""The command `vigpipe slurm write`: batch files of Slurm, to be changed and submitted."""

from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import check_new_file
from vigpipe.files.shipped import shipped


def write_batch_files(folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write train.sbatch and study.sbatch into a folder.

    Args:
        folder: the folder, which is made if there is none.
        overwrite: whether files of these names may be replaced.

    Returns:
        The files.

    Raises:
        InputError: a file is there already or cannot be written.
    """
    sources = sorted(shipped("slurm").glob("*.sbatch"))
    targets = [folder / source.name for source in sources]
    for target in targets:
        check_new_file(target, "", (".sbatch",), overwrite=overwrite)
    for source, target in zip(sources, targets, strict=True):
        try:
            write_atomically(target, source.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"{target}: cannot be written ({error.strerror}); choose another folder"
            ) from error
    return targets
