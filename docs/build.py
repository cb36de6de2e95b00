"""Build the site of the pages into site/: `.venv-docs/bin/python docs/build.py`.

Pages link to each other and to results/, stages/, slurm/ and examples/ by relative paths, which
work in a checkout as well. For the site, all of these are copied to build/pages/ in the same
places. A link, an anchor, an image or a name of the Python API that does not exist fails the build
(zensical's strict mode). So does a page that the navigation lacks or a name in it without a page;
zensical does not look for these, so this script does.
"""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
FILES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "tests/README.md",
)
FOLDERS = ("docs", "examples", "results", "slurm", "stages")


def copy_pages() -> None:
    """Copy everything that pages link to into build/pages/, in the same places."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in FILES:
        (PAGES / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, PAGES / name)
    for name in FOLDERS:
        others = ("__pycache__", "*.py") if name == "docs" else ("__pycache__",)
        shutil.copytree(ROOT / name, PAGES / name, ignore=shutil.ignore_patterns(*others))


def check_navigation() -> None:
    """Exit with a sentence if the navigation and the pages in docs/ are not the same."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    listed = list(_pages(config["project"]["nav"]))
    missing = [page for page in listed if not (ROOT / page).is_file()]
    left_out = sorted({f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - {*listed})
    if missing or left_out:
        sys.exit(
            f"zensical.toml: nav lists {', '.join(missing) or 'nothing'} that does not exist, and "
            f"leaves out {', '.join(left_out) or 'nothing'}; list every page of docs/ once"
        )


def _pages(nav: list[dict[str, Any]]) -> Iterator[str]:
    for entry in nav:
        for page in entry.values():
            if isinstance(page, str):
                yield page
            else:
                yield from _pages(page)


if __name__ == "__main__":
    check_navigation()
    copy_pages()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
