# SPDX-License-Identifier: Apache-2.0
"""Makes the picture of the page in docs/observability.md, of a simulated run: make_screenshot.py docs/report.png."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))
from support.chromium import chromium
from support.cli_runs import run
from support.simulated_journal import Job, Straggler, simulate_save, write_run

HEIGHT = 1900
STRAGGLERS = {
    **{number: Straggler("slow_storage", (682,), 3.5) for number in (12, 17, 21, 26, 29)},
    8: Straggler("more_bytes", (1,), 2.5),
    14: Straggler("slow_storage", tuple(range(64, 72)), 3.0),
    19: Straggler("late_arrival", (300,), seconds=2.5),
}


def records() -> list[dict[str, Any]]:
    job = Job(1024, mesh=(("dp", 32), ("tp", 32)), is_async=True)
    return [
        simulate_save(job, at, step=500 * (at + 1), at=1.7640e9 + 900 * at, straggler=STRAGGLERS.get(at))
        for at in range(30)
    ]


def main() -> None:
    (picture,) = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        path = write_run(Path(folder) / "llama", records())
        run("report", str(path))
        page = browser.new_page(viewport={"width": 1280, "height": HEIGHT})
        page.goto(f"file://{path}/.bcp/report.html")
        page.wait_for_selector("html[data-ready]", state="attached")
        page.evaluate(
            "document.getElementById('about').textContent = document.getElementById('about').textContent"
            ".replace(/^.*?: /, '/mnt/llama: ')"
        )
        page.screenshot(path=picture)
    # Flat areas need few colours, and fewer bytes with them.
    Image.open(picture).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
