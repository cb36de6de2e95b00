"""Open a page in a real headless browser without network, and say what it showed and asked for."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.debian import need_package

BROWSER = "chromium"
TIMEOUT_SECONDS = 180
PAGE_MILLISECONDS = 60_000  # of the page's own clock, which runs ahead while nothing happens
OWN_SCHEMES = ("file:", "data:", "blob:")
# The browser itself would look for updates, and would notice that it has no network.
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
)


@dataclass(frozen=True)
class Visit:
    """What a page did in the browser.

    Attributes:
        dom: the page as HTML after its scripts have run.
        pixels: (H, W, 3) uint8, the window from the top of the page.
        console: lines the page wrote to the console, errors of scripts and of loading included.
        requests: addresses asked for over a network.
    """

    dom: str
    pixels: np.ndarray
    console: list[str]
    requests: list[str]


def need_browser() -> None:
    """Skip the test without a browser; CI installs Debian's, as root."""
    need_package(BROWSER, lambda: shutil.which(BROWSER) is not None)


def visit(page: Path, folder: Path, *, width: int = 1200, height: int = 2000, dark: bool = False):
    """Open a file and let its scripts come to rest.

    Args:
        page: the HTML file.
        folder: an existing empty folder, for the browser's own files.
        width: of the window, pixels.
        height: likewise.
        dark: what the page hears of the reader's wish for light or dark.
    """
    log, picture = folder / "net.json", folder / "page.png"
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        f"--window-size={width},{height}",
        f"--virtual-time-budget={PAGE_MILLISECONDS}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom",
        f"--screenshot={picture}",
        page.absolute().as_uri(),
    ]
    env = {**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert picture.exists(), done.stderr
    return Visit(
        dom=done.stdout,
        pixels=np.asarray(Image.open(picture).convert("RGB")),
        console=re.findall(r"^\[.*:CONSOLE.*$", done.stderr, flags=re.MULTILINE),
        requests=_requests(json.loads(log.read_text())),
    )


def _requests(log: dict) -> list[str]:
    """Addresses that the page asked a network for; what the browser asks has no origin."""
    asked = [event.get("params", {}) for event in log["events"]]
    by_page = [p for p in asked if p.get("initiator", "not an origin") != "not an origin"]
    return sorted({p["url"] for p in by_page if not p["url"].startswith(OWN_SCHEMES)})


def share_of(pixels: np.ndarray, colour: str, tolerance: int = 6) -> float:
    """The share of the pixels that have a colour "#rrggbb"."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.int16)
    return float((np.abs(pixels.astype(np.int16) - wanted).max(-1) <= tolerance).mean())
