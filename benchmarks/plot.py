# SPDX-License-Identifier: Apache-2.0
"""Draws the results of compare.py: speed of save and load by contender, one panel for each JSON file.

Longer is better. The dashed lines are the disk itself in the same run. They are omitted if every contender stays far
below them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.results import ACTIONS, DISK, Comparison

WIDTH_PX, HEIGHT_PX, DPI = 1400, 700, 100
# Distinct in lightness too, so that the figure is readable without colours.
COLOURS = {"save": "#1f5fa8", "load": "#b35806"}
PALE_COLOURS = {"save": "#a6bfdb", "load": "#f3cfa0"}
BAR = 0.38
INK, GREY = "#222222", "#666666"


def draw_panel(axes: Any, comparison: Comparison) -> None:
    """Draws two bars for each contender, the fastest at saving on top."""
    names = [name for name in comparison.names() if name != DISK]
    names.sort(key=lambda name: comparison.gb_per_s(name, "save"))
    right = 1.5 * max(comparison.gb_per_s(name, action) for name in names for action in ACTIONS)
    if DISK in comparison.names():
        speeds = {action: comparison.gb_per_s(DISK, action) for action in ACTIONS}
        if min(speeds.values()) < 2 * right:
            right = max(right, *(1.25 * speed for speed in speeds.values()))
            draw_ceiling(axes, speeds, len(names) - 0.4)
    for row, name in enumerate(names):
        for action, centre in zip(ACTIONS, (row + BAR / 2, row - BAR / 2), strict=True):
            draw_bar(axes, comparison, name, action, centre, right)
    axes.set_xlim(0, right)
    axes.set_ylim(-0.6, len(names) - 0.1)
    axes.set_yticks(range(len(names)), [comparison.label(name) for name in names], fontsize=11, color=INK)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name == comparison.ours else "normal")
    axes.set_title(comparison.state, loc="left", fontsize=12.5, color=INK)
    axes.set_xlabel("GB/s", color=GREY)
    axes.tick_params(length=0, colors=GREY)
    axes.tick_params(axis="y", labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw_bar(axes: Any, comparison: Comparison, name: str, action: str, centre: float, right: float) -> None:
    """Draws one bar and its label: inside the bar if it is long, beside it otherwise."""
    ours = name == comparison.ours
    speed = comparison.gb_per_s(name, action)
    axes.barh(centre, speed, height=BAR, color=(COLOURS if ours else PALE_COLOURS)[action], zorder=5)
    text = f" {action}  {speed:.2f} GB/s, {comparison.median_s(name, action):.2f} s "
    style = {"va": "center", "fontsize": 9.5, "fontweight": "bold" if ours else "normal"}
    if speed > 0.45 * right:
        axes.text(speed, centre, text, ha="right", color="white" if ours else INK, zorder=6, **style)
    else:
        # White, so that the lines of the disk do not run through the label.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(speed, centre, text, ha="left", color=INK, bbox=box, zorder=4, **style)


def draw_ceiling(axes: Any, speeds: dict[str, float], top: float) -> None:
    for action, speed in speeds.items():
        axes.axvline(speed, ymax=0.99, color=COLOURS[action], linestyle="--", linewidth=1.4, zorder=3)
        # The labels of two lines that lie close together point away from each other.
        alignment = "right" if speed == min(speeds.values()) else "left"
        verb = "writes" if action == "save" else "reads"
        text = f" the disk {verb} {speed:.2f} "
        axes.text(speed, top, text, ha=alignment, fontsize=9.5, color=COLOURS[action])


def draw(comparisons: list[Comparison], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (WIDTH_PX / DPI, HEIGHT_PX / DPI)
    figure, panels = pyplot.subplots(1, len(comparisons), figsize=size, dpi=DPI, facecolor="white", squeeze=False)
    for axes, comparison in zip(panels[0], comparisons, strict=True):
        draw_panel(axes, comparison)
    first = comparisons[0]
    figure.suptitle(
        f"Durable save, and load with a cold page cache; median of {first.repetitions}, longer is better",
        x=0.01,
        ha="left",
        fontsize=15,
        color=INK,
    )
    figure.text(0.01, 0.925, machine.summary(first.machine), fontsize=11, color=GREY)
    figure.tight_layout(rect=(0, 0, 1, 0.92), w_pad=3)
    figure.savefig(file, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="what compare.py --json wrote, one panel each; two fit well")
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    arguments = parser.parse_args()
    comparisons = [Comparison.read(file) for file in arguments.json]
    if not all(comparison.repetitions for comparison in comparisons):
        sys.exit("a run without a counted round has nothing to draw")
    draw(comparisons, arguments.output)


if __name__ == "__main__":
    main()
