# SPDX-License-Identifier: Apache-2.0
"""Trains a transformer with FSDP2, saves it through bytecheckpoint, and resumes it on another number of ranks.

1. Ranks on the CPU train and save their state with ``dcp.save(..., storage_writer=BcpWriter(path))``.
2. The demo times saving and loading beside stock DCP. Then the same ranks train on, uninterrupted.
3. A job with fewer ranks loads the checkpoint, resharding it. Every tensor and every other value must exactly equal the
   full state gathered at the save. It trains on, and the demo prints its losses beside those of the uninterrupted job.
4. A process that cannot import bytecheckpoint loads the checkpoint with stock DCP, and compares it too.

The exit status is 0 if and only if all comparisons hold.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training.display import Display
from training.job import (
    OURS,
    STOCK,
    Compared,
    Event,
    JobOptions,
    LossMeasured,
    PhaseBegun,
    Tick,
    Timed,
    pretrain,
    resume,
)
from training.launch import DemoError, run_job
from training.model import ModelConfig

import bytecheckpoint

# Other numbers of ranks add in another order, so losses are close but not equal.
LARGEST_RELATIVE_DIFFERENCE = 1e-3


class Narrator:
    """Prints the events of both jobs as they arrive, and keeps timings and losses for the end."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.timings: list[Timed] = []
        self.uninterrupted: dict[int, float] = {}
        self.resuming = False

    def tell(self, event: Event) -> None:
        match event:
            case PhaseBegun(title, num_ticks):
                self.display.begin(title, num_ticks)
            case Tick():
                self.display.tick()
            case LossMeasured(step, loss):
                self._tell_loss(step, loss)
            case Timed():
                self._tell_timing(event)
            case Compared(what, equal, details):
                if not equal:
                    raise DemoError(f"{what}: {details}")
                self.display.line(f"{what}: {details}")

    def _tell_loss(self, step: int, loss: float) -> None:
        if not self.resuming:
            self.uninterrupted[step] = loss
            self.display.line(f"step {step:3}  loss {loss:.7f}")
            return
        wanted = self.uninterrupted[step]
        both = f"loss {loss:.7f}  uninterrupted {wanted:.7f}  difference {loss - wanted:+.1e}"
        self.display.line(f"step {step:3}  {both}")
        if not abs(loss - wanted) <= LARGEST_RELATIVE_DIFFERENCE * abs(wanted):
            raise DemoError(f"step {step}: loss {loss} after resuming, {wanted} without interruption")

    def _tell_timing(self, timing: Timed) -> None:
        if timing.action in ("save", "load"):
            self.timings.append(timing)
            return
        speed = gb_per_s(timing.disk_bytes, timing.seconds)
        self.display.line(f"{timing.action}: {timing.disk_bytes / 1e6:.1f} MB in {timing.seconds:.2f} s, {speed}")

    def tell_speeds(self) -> None:
        """Prints the medians of the timings, and their ranges."""
        if not self.timings:
            return
        rows = []
        for action in ("save", "load"):
            for engine in (STOCK, OURS):
                chosen = [timing for timing in self.timings if (timing.action, timing.engine) == (action, engine)]
                seconds = [timing.seconds for timing in chosen]
                median, num_bytes = statistics.median(seconds), chosen[-1].disk_bytes
                spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
                row = [f"{action}, {engine}", f"{num_bytes / 1e6:.1f}", f"{median:.2f}", spread]
                rows.append([*row, gb_per_s(num_bytes, median)])
        self.display.table(["", "MB", "seconds", "least - most", "speed"], rows)


def gb_per_s(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s"


def load_with_stock(options: JobOptions, display: Display) -> None:
    """Runs ``stock_load.py`` in a separate process and prints its output."""
    display.begin("load with stock DCP, bytecheckpoint hidden")
    script = Path(__file__).with_name("stock_load.py")
    command = [sys.executable, str(script), str(options.checkpoint), str(options.reference)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=options.time_limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"stock_load.py has not ended in {options.time_limit_s} s") from error
    display.line(result.stdout.rstrip())
    if result.returncode != 0:
        raise DemoError(f"stock_load.py: exit status {result.returncode}\n{result.stderr}")


def run_demo(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    options = JobOptions(
        directory=directory,
        model=ModelConfig(layers=arguments.layers, width=arguments.width),
        num_sequences=arguments.batch,
        steps=arguments.steps,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
        time_limit_s=arguments.time_limit,
    )
    narrator = Narrator(display)
    build = bytecheckpoint.build_info()
    display.line(f"bytecheckpoint {build['version']}, format {build['format_version']}, torch {build['torch']}")

    display.begin(f"start {arguments.ranks} ranks")
    run_job(pretrain, arguments.ranks, options, narrator.tell)

    display.begin(f"start {arguments.resume_ranks} ranks")
    narrator.resuming = True
    run_job(resume, arguments.resume_ranks, options, narrator.tell)

    load_with_stock(options, display)
    display.line(
        f"\nSave and load on {arguments.ranks} ranks, in turn: one round unreported, then the median of "
        f"{arguments.repetitions}; fresh directories, files synced by both, page cache dropped before each load:"
    )
    narrator.tell_speeds()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to make the working directory: on the disk to be measured")
    parser.add_argument("--keep", action="store_true", help="keep the working directory, with the checkpoint in it")
    for option, default, meaning in (
        ("--ranks", 4, "ranks that train and save"),
        ("--resume-ranks", 2, "ranks that load and train on"),
        ("--steps", 5, "training steps before the save, and again after it"),
        ("--batch", 8, "sequences in the global batch, a multiple of both numbers of ranks"),
        ("--layers", 10, "layers of the model"),
        ("--width", 512, "width of the model, a multiple of 64"),
        ("--repetitions", 3, "timed rounds of saving and loading"),
        ("--seed", 1, "seed of parameters and data"),
        ("--time-limit", 300, "seconds that each job may take"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    arguments = parser.parse_args()
    for option, value in vars(arguments).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1 and option != "seed":
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    if arguments.batch % arguments.ranks or arguments.batch % arguments.resume_ranks:
        parser.error("--batch must be a multiple of --ranks and of --resume-ranks")
    if arguments.dir is not None and not arguments.dir.is_dir():
        parser.error(f"--dir {arguments.dir}: no such directory")
    if arguments.width % ModelConfig.head_dim:
        parser.error(f"--width must be a multiple of {ModelConfig.head_dim}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    start = time.monotonic()
    # Unwinds the stack, so that SIGTERM does not leave ranks and the directory behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = Path(tempfile.mkdtemp(prefix="bytecheckpoint_demo_", dir=arguments.dir))
    try:
        with Display() as display:
            run_demo(arguments, directory, display)
        print(f"The demo has passed, in {time.monotonic() - start:.0f} s.")
        return 0
    except DemoError as error:
        print(f"The demo has FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if arguments.keep:
            print(f"Kept: {directory}")
        else:
            shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
