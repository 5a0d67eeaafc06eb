# SPDX-License-Identifier: Apache-2.0
"""Publishing deltas of weights beside whole saves: bytes, the speed at which changes are found, and the way across.

Of a bf16 state, some elements are changed at random, published, and taken over by a subscriber in the same process.
Beside it the whole state goes the same way: by our own save and load, and by `torch.save` and `torch.load` through a
file. Each runs twice: with the disk as it is, and with a place of 500 MB/s. There our own writing is held back by
`write_bytes_per_s`; whatever has no such limit (reading, `torch.save`) is counted with the seconds that its bytes take
at that speed, if it took less.

Then a small model takes steps of AdamW on bf16 parameters, and each step is published.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from rich.console import Console
from rich.table import Table

from bytecheckpoint import Config, Publisher, PublishReport, Subscriber, load_state_dict, save_state_dict
from bytecheckpoint.native import _C

LIMITED_B_PER_S = 500_000_000
AS_IT_IS, LIMITED = "the disk as it is", f"{LIMITED_B_PER_S / 1e6:.0f} MB/s"
FIND, PUBLISH, UPDATE = "find changes", "publish", "update"
SAVE, LOAD, TORCH_SAVE, TORCH_LOAD = "save", "load", "torch.save", "torch.load"
POSITION_BYTES, VALUE_BYTES = 4, 2

State = dict[str, torch.Tensor]


def change(state: State, share: float, draw: torch.Generator) -> int:
    """Changes a share of the elements at random; returns how many."""
    num_changed = 0
    for tensor in state.values():
        drawn = torch.randint(tensor.numel(), (int(share * tensor.numel()),), generator=draw)
        places: torch.Tensor = torch.unique(drawn)
        tensor.view(torch.int16).view(-1)[places] ^= 1
        num_changed += len(places)
    return num_changed


def at_limit(seconds: float, num_bytes: int, limit: int) -> float:
    """Returns the seconds that a transfer takes if the place is no faster than a limit; 0 for no limit."""
    return max(seconds, num_bytes / limit) if limit else seconds


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Way:
    """A state, and its ways to another one by one place.

    Args:
        folder: The place.
        state: What is published and saved.
        limit: Bytes in a second; 0 for no limit.
    """

    def __init__(self, folder: Path, state: State, limit: int) -> None:
        self.folder, self.state, self.limit = folder, state, limit
        self.into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.subscribed = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.config = dataclasses.replace(Config.from_env(), write_bytes_per_s=limit)
        options: dict[str, Any] = {"no_dist": True, "config": self.config}
        self.publisher = Publisher(folder / "published", base_every=1_000_000, keep_versions=2, **options)
        self.subscriber = Subscriber(folder / "published", **options)
        self.version = 0
        self.reports: list[PublishReport] = []

    def publish(self) -> None:
        self.version += 1
        self.reports.append(self.publisher.publish(self.state, self.version))

    def update(self) -> None:
        assert self.subscriber.update(self.subscribed) == self.version

    def save(self) -> None:
        save_state_dict(self.folder / "saved", self.state, no_dist=True, config=self.config)

    def load(self) -> None:
        load_state_dict(self.folder / "saved", self.into, no_dist=True, config=self.config)

    def torch_save(self) -> None:
        with (self.folder / "file").open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        for name, tensor in torch.load(self.folder / "file", mmap=True).items():
            self.into[name].copy_(tensor)

    def newest_delta(self) -> Path:
        return max((self.folder / "published").glob("delta-*"))

    def calls(self) -> dict[str, tuple[Callable[[], None], Callable[[], int]]]:
        """Returns the calls in their order, each with the bytes that no setting limits."""
        saved, file = self.folder / "saved", self.folder / "file"
        return {
            PUBLISH: (self.publish, lambda: 0),
            UPDATE: (self.update, lambda: bytes_in(self.newest_delta())),
            SAVE: (self.save, lambda: 0),
            LOAD: (self.load, lambda: bytes_in(saved)),
            TORCH_SAVE: (self.torch_save, lambda: file.stat().st_size),
            TORCH_LOAD: (self.torch_load, lambda: file.stat().st_size),
        }


def measure(way: Way, share: float, args: Any, watch: Stopwatch) -> dict[str, list[float]]:
    """Times all calls in turn, each time with other changes."""
    draw = torch.Generator().manual_seed(1)
    way.publish()
    way.update()
    seconds: dict[str, list[float]] = {each: [] for each in (FIND, *way.calls())}
    for repetition in range(args.repetitions + 1):
        changed = change(way.state, share, draw)
        for each, (call, unlimited) in way.calls().items():
            if each in (UPDATE, LOAD, TORCH_LOAD):
                drop_page_cache(way.folder)
            took = at_limit(watch.time(call), unlimited(), way.limit)
            if repetition:
                seconds[each].append(took)
            if each == UPDATE:
                got = way.subscribed
                assert all(torch.equal(got[n].view(torch.int16), t.view(torch.int16)) for n, t in way.state.items())
        assert way.reports[-1].kind == "delta"
        assert way.reports[-1].num_changed == changed
        before = {name: tensor.clone() for name, tensor in way.state.items()}
        change(way.state, share, draw)
        took = watch.time(lambda before=before: find(way, before))  # type: ignore[misc]
        seconds[FIND] += [took] if repetition else []
        for name, tensor in before.items():
            way.state[name].copy_(tensor)
    return seconds


def find(way: Way, before: State) -> None:
    num_threads = way.config.staging_threads
    assert (
        _C.find_changes([*way.state.values()], [*before.values()], num_threads=num_threads, most_bytes=1 << 62)
        is not None
    )


def steps_of_adamw(folder: Path, num_steps: int, lr: float) -> list[PublishReport]:
    """Publishes the bf16 parameters of a small transformer before and after each of some steps."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    publisher = Publisher(folder / "steps", base_every=1_000_000, no_dist=True)
    reports = [publisher.publish(model.state_dict(), 0)]
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 32, 256, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        reports.append(publisher.publish(model.state_dict(), step))
    return reports


def show(seconds: dict[str, dict[str, list[float]]], way: Way, console: Console) -> dict[str, float]:
    """Prints medians, and returns the figures that matter."""
    num_bytes = sum(tensor.nbytes for tensor in way.state.values())
    medians = {of: {each: statistics.median(took) for each, took in calls.items()} for of, calls in seconds.items()}
    table = Table("", *medians, title=f"{num_bytes / 1e9:.2f} GB of bf16, seconds")
    for each in medians[AS_IT_IS]:
        table.add_row(each, *(f"{of_one[each]:.3f}" for of_one in medians.values()))
    console.print(table)
    report = way.reports[-1]
    ideal = report.num_changed * (POSITION_BYTES + VALUE_BYTES)
    figures = {
        "find changes, GB/s": num_bytes / 1e9 / medians[AS_IT_IS][FIND],
        "bytes of a delta on disk, of changed elements x 6": bytes_in(way.newest_delta()) / ideal,
    }
    for of, calls in medians.items():
        across = calls[PUBLISH] + calls[UPDATE]
        figures[f"publish and update, of save and load; {of}"] = across / (calls[SAVE] + calls[LOAD])
        figures[f"publish and update, of torch.save and load; {of}"] = across / (calls[TORCH_SAVE] + calls[TORCH_LOAD])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the state (default 1)")
    parser.add_argument("--tensors", type=int, default=20, help="(default 20)")
    parser.add_argument("--share", type=float, default=0.02, help="of the elements that change (default 0.02)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the small model (default 1e-6)")
    add_arguments(parser)
    args = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="publish-"))
    draw = torch.Generator().manual_seed(0)
    numel = int(args.gigabytes * 1e9 / 2 / args.tensors)
    seconds: dict[str, dict[str, list[float]]] = {}
    try:
        with Stopwatch(args.warm_gib, args.idle_limit_s) as watch:
            for name, limit in ((LIMITED, LIMITED_B_PER_S), (AS_IT_IS, 0)):
                state = {f"w{n}": torch.randn(numel, generator=draw).to(torch.bfloat16) for n in range(args.tensors)}
                way = Way(folder / f"{limit}", state, limit)
                way.folder.mkdir()
                seconds[name] = measure(way, args.share, args, watch)
        figures = show(seconds, way, console)
        reports = steps_of_adamw(folder, 5, args.lr)
    finally:
        shutil.rmtree(folder)
    num_elements = reports[0].base_bytes // VALUE_BYTES
    for step, report in enumerate(reports[1:], 1):
        changed = report.num_changed / num_elements
        said = f"{report.delta_bytes:,} bytes" if report.delta_bytes else f"a base: {report.reason}"
        console.print(f"AdamW, lr {args.lr:g}, step {step}: {changed:.1%} of {num_elements:,} elements changed; {said}")
    for what, figure in figures.items():
        console.print(f"{what}: {figure:.2f}")
    print(f"{watch.busy_starts} of {watch.num_calls} calls began on a busy machine")
    if args.json:
        steps = [{"changed": each.num_changed, "bytes": each.delta_bytes or each.base_bytes} for each in reports]
        facts = machine.facts(args.dir)
        args.json.write_text(
            json.dumps({"seconds": seconds, "figures": figures, "adamw": steps, "machine": facts}, indent=1)
        )


if __name__ == "__main__":
    main()
