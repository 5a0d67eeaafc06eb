# SPDX-License-Identifier: Apache-2.0
"""Compares torchtitan's own checkpoint manager with the one on bytecheckpoint, which a flag selects, on CPU ranks.

1. Ranks train a transformer with FSDP2 and torchtitan's optimizers, schedulers and data loader. The manager comes from
   torchtitan's configuration after ``--override.imports bytecheckpoint.torchtitan.use``. It saves in the background.
2. Both managers save and load the same state in turn, and the demo times them.
3. A job with fewer ranks resumes through the manager on bytecheckpoint, which reshards. Its state must exactly equal
   the saved one. torchtitan's own manager loads the same checkpoint, and must get the same state.

The exit status is 0 if and only if all comparisons hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import logging
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training.display import Display
from training.job import Compared, Event, JobOptions, LossMeasured, PhaseBegun, Tick, Timed, drop_page_cache, timed
from training.launch import DemoError, run_job
from training.model import CONTEXT, Decoder, ModelConfig, global_batch, next_token_loss

import bytecheckpoint

FLAG = "bytecheckpoint.torchtitan.use"
OURS, THEIRS = "bytecheckpoint", "torchtitan"
SAVE, RETURNS, COMMITTED, LOAD = "save", "background, returns", "background, committed", "load"


class Samples(torch.utils.data.IterableDataset[Any]):
    """The data stream that the model learns, and its current position."""

    def __init__(self, rank: int, num_ranks: int, num_sequences: int) -> None:
        self.rank, self.num_ranks, self.num_sequences, self.step = rank, num_ranks, num_sequences, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            for sequence in global_batch(self.step, self.num_sequences, 0).chunk(self.num_ranks)[self.rank]:
                yield {"input": sequence}, sequence[:1]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class TitanJob:
    """The objects that torchtitan's trainer builds and gives to its checkpoint manager. All methods are collective.

    torchtitan's own models and trainer need GPUs, so the model and the training loop are the demo's.
    """

    def __init__(self, options: JobOptions, seed: int) -> None:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        torch.manual_seed(seed)
        model = Decoder(options.model)
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=100
        )
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        samples = Samples(rank, num_ranks, options.num_sequences)
        self.loader = ParallelAwareDataloader(samples, rank, num_ranks, batch_size=options.num_sequences // num_ranks)
        self.batches = iter(self.loader)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def manager(self, options: JobOptions, engine: str, **fields: Any) -> Any:
        """Returns the manager that torchtitan itself makes from a configuration and a flag."""
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.config import Configurable
        from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            checkpoint: Any

        settings = {"enable": True, "folder": engine, "interval": 1, "keep_latest_k": 0, **fields}
        config = Config(checkpoint=CheckpointManager.Config(**settings))
        if engine == OURS:
            apply_overrides(OverrideConfig(imports=parse_cli_imports([FLAG])), config)
        return config.checkpoint.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(options.directory),
        )

    def train_step(self, manager: Any) -> float:
        inputs, _ = next(self.batches)
        loss = next_token_loss(self.model, inputs["input"])
        loss.backward()
        manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedulers.step()
        self.step += 1
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def digest(self) -> str:
        """Returns a digest of every byte of the state except the data loader's, for any number of ranks."""
        state = {**self.model.state_dict(), **self.optimizers.state_dict(), **self.schedulers.state_dict()}
        digest = hashlib.sha256(str(self.step).encode())
        for name, value in sorted(state.items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(name.encode())
            if isinstance(whole, torch.Tensor):
                digest.update(whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(whole).encode())
        return digest.hexdigest()


def pretrain(options: JobOptions, tell: Callable[[Event], None]) -> None:
    quiet()
    job = TitanJob(options, options.seed)
    manager = job.manager(options, OURS, async_mode="async_with_pinned_mem")
    tell(PhaseBegun(f"train, {type(manager).__name__} by the flag", options.steps))
    for step in range(1, options.steps + 1):
        tell(LossMeasured(step, job.train_step(manager)))
        if step == options.steps:
            manager.save(step)
        tell(Tick())
    manager.close()
    saved = job.digest()
    if dist.get_rank() == 0:
        (options.directory / "digest").write_text(saved)
    dist.barrier()
    measure(job, options, tell)


def measure(job: TitanJob, options: JobOptions, tell: Callable[[Event], None]) -> None:
    """Times both managers in turn. The first round is not reported."""
    tell(PhaseBegun("measure both managers in turn", 2 * (options.repetitions + 1)))
    engines = [THEIRS, OURS]
    for repetition in range(options.repetitions + 1):
        for engine in engines:
            folder = f"{engine}-measured"
            for timing in measure_once(job, options, engine, folder):
                if repetition:
                    tell(timing)
            tell(Tick())
            if dist.get_rank() == 0:
                shutil.rmtree(options.directory / folder)
            dist.barrier()
        engines.reverse()


def measure_once(job: TitanJob, options: JobOptions, engine: str, folder: str) -> list[Timed]:
    manager = job.manager(options, engine, folder=folder)
    timings = {SAVE: timed(lambda: manager.save(1))}
    path = options.directory / folder / "step-1"
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    if dist.get_rank() == 0:
        drop_page_cache(path)
    timings[LOAD] = timed(lambda: manager.load(1))
    manager.close()
    manager = job.manager(options, engine, folder=folder, async_mode="async")
    manager.save(2)
    manager.maybe_wait_for_saving()  # the first save allocates memory that later saves reuse
    timings[RETURNS] = timed(lambda: manager.save(3))
    timings[COMMITTED] = timings[RETURNS] + timed(manager.maybe_wait_for_saving)
    manager.close()
    return [Timed(engine, action, seconds, num_bytes) for action, seconds in timings.items()]


def resume(options: JobOptions, tell: Callable[[Event], None]) -> None:
    quiet()
    wanted = (options.directory / "digest").read_text()
    for number, engine in enumerate((OURS, THEIRS)):
        job = TitanJob(options, options.seed + 1 + number)
        tell(PhaseBegun(f"resume through the manager of {engine}", 2))
        # torchtitan's data loader cannot be resharded, so the data start from the beginning.
        manager = job.manager(options, engine, folder=OURS, exclude_from_loading=["dataloader"])
        loaded = manager.load()
        same = loaded and job.digest() == wanted
        what = f"loaded by {engine} on {dist.get_world_size()} ranks"
        tell(Compared(what, same, "every byte is the same" if same else "the state is another"))
        tell(Tick())
        tell(LossMeasured(options.steps + 1, job.train_step(manager)))
        tell(Tick())
        manager.close()


def quiet() -> None:
    """Silences torchtitan's root logger, which repeats what the demo prints, and warnings of torch and torchdata."""
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)


class Narrator:
    """Prints the events as they arrive, and keeps the timings."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.timings: list[Timed] = []

    def tell(self, event: Event) -> None:
        match event:
            case PhaseBegun(title, num_ticks):
                self.display.begin(title, num_ticks)
            case Tick():
                self.display.tick()
            case LossMeasured(step, loss):
                self.display.line(f"step {step:3}  loss {loss:.7f}")
            case Timed():
                self.timings.append(event)
            case Compared(what, equal, details):
                if not equal:
                    raise DemoError(f"{what}: {details}")
                self.display.line(f"{what}: {details}")

    def tell_speeds(self) -> None:
        rows = []
        for action in (SAVE, RETURNS, COMMITTED, LOAD):
            medians = {}
            for engine in (THEIRS, OURS):
                seconds = [t.seconds for t in self.timings if (t.action, t.engine) == (action, engine)]
                medians[engine] = statistics.median(seconds)
                spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
                times = f"{medians[THEIRS] / medians[engine]:.2f}"
                rows.append([f"{action}, {engine}", f"{medians[engine]:.3f}", spread, times])
        self.display.table(["", "seconds", "least - most", f"x {THEIRS}"], rows)


def run_demo(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    options = JobOptions(
        directory=directory,
        model=ModelConfig(layers=arguments.layers, width=arguments.width),
        num_sequences=8,
        steps=arguments.steps,
        repetitions=arguments.repetitions,
        seed=1,
        time_limit_s=300,
    )
    from torchtitan import __version__ as titan

    display.line(f"torchtitan {titan}, bytecheckpoint {bytecheckpoint.__version__}; context of {CONTEXT} tokens")
    narrator = Narrator(display)
    display.begin(f"start {arguments.ranks} ranks")
    run_job(pretrain, arguments.ranks, options, narrator.tell)
    display.begin(f"start {arguments.resume_ranks} ranks")
    run_job(resume, arguments.resume_ranks, options, narrator.tell)
    num_bytes = max(timing.disk_bytes for timing in narrator.timings)
    display.line(
        f"\n{num_bytes / 1e6:.0f} MB on {arguments.ranks} ranks, both managers in turn, medians of "
        f"{arguments.repetitions} rounds; page cache dropped before each load:"
    )
    narrator.tell_speeds()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to make the working directory: on the disk to be measured")
    for option, default, meaning in (
        ("--ranks", 4, "ranks that train and save; 8 is a multiple of it"),
        ("--resume-ranks", 2, "ranks that load; 8 is a multiple of it"),
        ("--steps", 4, "training steps before the save"),
        ("--layers", 8, "layers of the model"),
        ("--width", 512, "width of the model, a multiple of 64"),
        ("--repetitions", 5, "timed rounds"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    arguments = parser.parse_args()
    if find_spec("torchtitan") is None:
        parser.error("torchtitan is not installed: pip install torchtitan==0.3.0")
    start = time.monotonic()
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
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
