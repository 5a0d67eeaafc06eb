# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer four times, and shows what its checkpoints cost each step.

Each run has the same model, data and seed, in one process: without checkpoints, with stock ``dcp.save``, with stock
``dcp.async_save``, and with ``bytecheckpoint.async_save_state_dict``. A chart in the terminal shows the time of every
step (``--png`` also draws it to a file), and a table shows the stall of a checkpoint: how much longer its step takes
than the median step without one, including the wait for the previous save. At the end, stock ``dcp.load`` loads the
last checkpoint of each run, and the demo compares everything in it exactly with the state at that step.

The exit status is 0 if and only if all of them are equal.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from training.comparison import blank_copy, compare
from training.display import Display
from training.model import Decoder, ModelConfig, global_batch, next_token_loss

import bytecheckpoint

State = dict[str, Any]
# Starts a save. Returns what to wait for before the next save, if this one continues in the background.
Save = Callable[[Path, State], Any]


def save_stock(path: Path, state: State) -> None:
    dcp.save(state, checkpoint_id=path)


def async_save_stock(path: Path, state: State) -> Any:
    return dcp.async_save(state, checkpoint_id=path)


def async_save_ours(path: Path, state: State) -> Future[Any]:
    return bytecheckpoint.async_save_state_dict(path, state).committed


NO_SAVES = "no checkpoints"
WAYS: dict[str, Save | None] = {
    NO_SAVES: None,
    "dcp.save": save_stock,
    "dcp.async_save": async_save_stock,
    "bytecheckpoint": async_save_ours,
}
COLOURS = {NO_SAVES: "#777777", "dcp.save": "#b35806", "dcp.async_save": "#e0a030", "bytecheckpoint": "#1f5fa8"}
CHART_COLOURS = {NO_SAVES: "gray", "dcp.save": "red", "dcp.async_save": "orange", "bytecheckpoint": "blue"}
MARKERS = {NO_SAVES: ".", "dcp.save": "S", "dcp.async_save": "a", "bytecheckpoint": "B"}


@dataclass
class Run:
    """One training run and its last checkpoint.

    Attributes:
        step_s: Seconds of each step, including the start of the checkpoint.
        total_s: From the first step to the last commit.
        path: Path of the last checkpoint.
        state: A copy of the state that the checkpoint must hold.
    """

    step_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    path: Path | None = None
    state: State | None = None

    def median_s(self) -> float:
        return statistics.median(self.step_s)

    def stalls_s(self, every: int) -> list[float]:
        """Returns, for each step that started a checkpoint, its seconds beyond the median of the other steps."""
        others = [s for step, s in enumerate(self.step_s, 1) if step % every]
        usual = statistics.median(others or self.step_s)
        return [s - usual for step, s in enumerate(self.step_s, 1) if step % every == 0]


class Trainer:
    """A model and its Adam optimizer, in their state before the first step."""

    def __init__(self, config: ModelConfig, num_sequences: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = Decoder(config)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=3e-4)
        self._num_sequences = num_sequences
        self._seed = seed

    def step(self, step: int) -> None:
        loss = next_token_loss(self._model, global_batch(step, self._num_sequences, self._seed))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def state(self, step: int) -> State:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}


def train(save: Save | None, directory: Path, arguments: argparse.Namespace, display: Display) -> Run:
    config = ModelConfig(layers=arguments.layers, width=arguments.dim)
    trainer = Trainer(config, arguments.batch, arguments.seed)
    trainer.step(0)  # the first step allocates memory that the others use
    run = Run()
    future: Future[Any] | None = None
    last_checkpoint = arguments.steps // arguments.every * arguments.every
    copying_s = 0.0
    begin = time.perf_counter()
    for step in range(1, arguments.steps + 1):
        step_begin = time.perf_counter()
        trainer.step(step)
        if save is not None and step % arguments.every == 0:
            if future is not None:
                future.result()  # one save at a time, as training jobs do
            run.path = directory / f"step-{step}"
            future = save(run.path, trainer.state(step))
        run.step_s.append(time.perf_counter() - step_begin)
        if step == last_checkpoint:
            copying = time.perf_counter()
            run.state = copy.deepcopy(trainer.state(step))  # for the comparison; no training job does this
            copying_s = time.perf_counter() - copying
        display.tick()
    if future is not None:
        future.result()
    run.total_s = time.perf_counter() - begin - copying_s
    return run


def check(name: str, run: Run, display: Display) -> bool:
    """Whether stock DCP loads what was saved."""
    assert run.path is not None
    loaded = blank_copy(run.state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(run.path))
    comparison = compare(run.state, loaded)
    display.line(f"{run.path.name} of {name}, loaded with stock dcp.load: {comparison}")
    return comparison.equal


def show_chart(runs: dict[str, Run], display: Display) -> None:
    """Shows steps on the x axis and milliseconds on the y axis. A letter above the dots is a stall."""
    if find_spec("plotext") is None:
        display.line("no chart: plotext is not installed")
        return
    import plotext

    plotext.clear_figure()
    plotext.plot_size(min(110, display.console.width), 20)
    plotext.title("milliseconds of each step")
    plotext.xlabel("step")
    for name, run in runs.items():
        steps = list(range(1, len(run.step_s) + 1))
        milliseconds = [s * 1e3 for s in run.step_s]
        plotext.scatter(steps, milliseconds, label=name, marker=MARKERS[name], color=CHART_COLOURS[name])
    plotext.ylim(0, None)
    text = plotext.build()
    print(text if display.console.is_terminal else plotext.uncolorize(text), flush=True)


def draw_png(runs: dict[str, Run], every: int, file: Path) -> None:
    """Draws one panel for each run, all to the same scale. Steps that started a checkpoint are opaque."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(len(runs), 1, sharex=True, sharey=True, figsize=(10, 2.1 * len(runs)), dpi=110)
    for axes, (name, run) in zip(all_axes, runs.items(), strict=True):
        steps = range(1, len(run.step_s) + 1)
        alphas = [0.4 if step % every or WAYS[name] is None else 1.0 for step in steps]
        bars = axes.bar(steps, [s * 1e3 for s in run.step_s], color=COLOURS[name])
        for bar, alpha in zip(bars, alphas, strict=True):
            bar.set_alpha(alpha)
        stalls = "" if WAYS[name] is None else f": a checkpoint stalls training {stall_text(run, every)}"
        axes.set_title(f"{name}{stalls}", loc="left", fontsize=11)
        axes.set_ylabel("ms")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[-1].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def stall_text(run: Run, every: int) -> str:
    return f"{statistics.median(run.stalls_s(every)) * 1e3:.0f} ms"


def show_table(runs: dict[str, Run], every: int, display: Display) -> None:
    rows = []
    bare_s = runs[NO_SAVES].total_s
    for name, run in runs.items():
        stalls = (
            ["", ""] if WAYS[name] is None else [stall_text(run, every), f"{max(run.stalls_s(every)) * 1e3:.0f} ms"]
        )
        row = [name, f"{run.median_s() * 1e3:.0f} ms", *stalls]
        rows.append([*row, f"{run.total_s:.2f} s", "" if name == NO_SAVES else f"{run.total_s / bare_s - 1:+.1%}"])
    display.table(["", "median step", "stall", "longest", "total", "added"], rows)


def run_demo(arguments: argparse.Namespace, directory: Path, display: Display) -> bool:
    torch.set_num_threads(arguments.threads)
    runs = {}
    are_equal = []
    config = ModelConfig(layers=arguments.layers, width=arguments.dim)
    num_parameters = sum(parameter.numel() for parameter in Decoder(config).parameters())
    display.line(
        f"{num_parameters / 1e6:.1f} million parameters, {num_parameters * 12 / 1e6:.0f} MB with Adam; "
        f"{arguments.steps} steps, a checkpoint every {arguments.every}; torch threads: {arguments.threads}"
    )
    for name, save in WAYS.items():
        display.begin(f"train: {name}", arguments.steps)
        below = directory / name.replace(" ", "-")
        runs[name] = train(save, below, arguments, display)
        if save is not None:
            are_equal.append(check(name, runs[name], display))
            shutil.rmtree(below)
        runs[name].state = None  # frees memory
    bytecheckpoint.shutdown()
    show_chart(runs, display)
    show_table(runs, arguments.every, display)
    if arguments.png:
        draw_png(runs, arguments.every, arguments.png)
        display.line(f"drawn: {arguments.png}")
    return all(are_equal)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to make the working directory: on the disk to be measured")
    parser.add_argument("--png", type=Path, metavar="PATH", help="also draw the chart to this file (needs matplotlib)")
    for option, default, meaning in (
        ("--steps", 30, "training steps of each run"),
        ("--every", 6, "steps from checkpoint to checkpoint"),
        ("--dim", 512, "width of the model, a multiple of 64"),
        ("--layers", 4, "layers of the model"),
        ("--batch", 2, "sequences in a batch"),
        ("--threads", 1, "torch threads; with all cores taken, saving in the background has none to itself"),
        ("--seed", 1, "seed of parameters and data"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    arguments = parser.parse_args()
    for option in ("steps", "every", "dim", "layers", "batch", "threads"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option} must be at least 1")
    if arguments.every > arguments.steps:
        parser.error("--every must not be more than --steps: there would be no checkpoint")
    if arguments.dim % ModelConfig.head_dim:
        parser.error(f"--dim must be a multiple of {ModelConfig.head_dim}")
    if arguments.dir is not None and not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    if arguments.png and find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    # The demo uses one process without a process group on purpose.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    # Unwinds the stack, so that SIGTERM does not leave the directory behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory(prefix="bytecheckpoint_demo_", dir=arguments.dir) as directory,
        Display() as display,
    ):
        is_passed = run_demo(arguments, Path(directory), display)
    print("The demo has passed." if is_passed else "The demo has FAILED.", file=sys.stdout if is_passed else sys.stderr)
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
