#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a Hugging Face folder: into an FSDP2 model on several ranks, or whole by one process, also to a GPU.

On several ranks, ours and DCP's reader of safetensors take part. The model is sharded by `fully_shard` over gloo ranks
of one machine, along dim 0, or along dim 1 as tensor parallelism does. A load begins for all ranks at once and ends
with the last. Beside them, one process loads all files with `safetensors.torch.load_file`, which is no sharded load.
Every sharded load is compared.

With `--ranks 1` nothing is sharded, and every tensor ends on `--device`. Ours and DCP's reader fill tensors that exist.
`safetensors`, `fastsafetensors` (without GPUDirect Storage) and Run:ai's streamer return new ones; the last two take
part where they are installed and work. Every load is compared. The file of `--json` is written after each round.

Contenders take turns, in another order each round, with a cold page cache.

    python benchmarks/load_hf.py --gigabytes 1 --repetitions 3
    python benchmarks/load_hf.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from measurement.whole_loads import BASELINE as WHOLE_BASELINE
from measurement.whole_loads import WholeLoads
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint

BASELINE = "DCP's HuggingFaceStorageReader"
ONE_RANK = "safetensors.load_file, one rank, whole"
_LAYERS = 16
_FILE_BYTES = 500_000_000


class Layer(nn.Module):
    """What `fully_shard` wraps: the matrices of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name, shape in {
            "q": (width, width), "k": (width // 4, width), "v": (width // 4, width), "o": (width, width),
            "gate": (3 * width, width), "up": (3 * width, width), "down": (width, 3 * width), "norm": (width,),
        }.items():  # fmt: skip
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))


class Model(nn.Module):
    """A model of about so many bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        width = int((num_bytes / 2 / _LAYERS / 11.5) ** 0.5) // 64 * 64
        self.layers = nn.ModuleList(Layer(width) for _ in range(_LAYERS))


def write_folder(folder: Path, num_bytes: int) -> None:
    """Writes the model as Hugging Face does: several files, and an index."""
    torch.manual_seed(0)
    state = {name: torch.randn(each.shape).to(each.dtype) for name, each in Model(num_bytes).state_dict().items()}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, value in state.items():
        if sum(each.nbytes for each in shards[-1].values()) + value.nbytes > _FILE_BYTES:
            shards.append({})
        shards[-1][name] = value
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def placement(parameter: nn.Parameter, dim: int) -> Shard:
    return Shard(min(dim, parameter.dim() - 1))


State = dict[str, DTensor]


def load_ours(state: State, folder: Path) -> None:
    bytecheckpoint.load_state_dict(folder, state)


def load_with_dcp(state: State, folder: Path) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))


def load_on_one(state: State, folder: Path) -> None:
    if dist.get_rank() == 0:
        for file in sorted(folder.glob("*.safetensors")):
            load_file(file)


CONTENDERS: dict[str, Callable[[State, Path], None]] = {
    "bytecheckpoint": load_ours,
    BASELINE: load_with_dcp,
    ONE_RANK: load_on_one,
}


def one_round(name: str, state: State, folder: Path, stopwatch: Stopwatch | None) -> float:
    """Returns the seconds until the last rank has loaded."""
    if dist.get_rank() == 0:
        drop_page_cache(folder)
    for value in state.values():
        value.to_local().zero_()
    with stopwatch.conditions() if stopwatch is not None else nullcontext():
        dist.barrier()
        begin = time.perf_counter()
        CONTENDERS[name](state, folder)
        dist.barrier()
        seconds = time.perf_counter() - begin
    if name != ONE_RANK:
        check(state, folder)
    dist.barrier()
    return seconds


def check(state: State, folder: Path) -> None:
    whole = {name: value.full_tensor() for name, value in state.items()}
    if dist.get_rank() != 0:
        return
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if not torch.equal(whole[name], value):
                raise AssertionError(f"{name}: not what is in {file.name}")


def run_rank(rank: int, root: str, arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=arguments.ranks)
    folder, num_bytes = Path(root) / "hf", int(arguments.gigabytes * 1e9)
    if rank == 0:
        folder.mkdir()
        write_folder(folder, num_bytes)
    dist.barrier()
    model = Model(num_bytes)
    place = partial(placement, dim=arguments.dim)
    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=place)
    fully_shard(model, shard_placement_fn=place)
    state = model.state_dict()
    rounds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) if rank == 0 else nullcontext() as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in random.Random(repetition).sample(list(rounds), len(rounds)):
                seconds = one_round(name, state, folder, stopwatch)
                if repetition:
                    rounds[name].append(seconds)
        if stopwatch is not None:
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
            keep(rounds, num_bytes, arguments)
            report(rounds, num_bytes, stopwatch, arguments)
    bytecheckpoint.shutdown()
    dist.destroy_process_group()


def run_whole(root: Path, arguments: argparse.Namespace) -> None:
    folder = root / "hf"
    folder.mkdir()
    write_folder(folder, int(arguments.gigabytes * 1e9))
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    loads = WholeLoads(folder, torch.device(arguments.device))
    rounds: dict[str, list[float]] = {name: [] for name in loads.names}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in random.Random(repetition).sample(list(rounds), len(rounds)):
                load = loads.prepared(name)
                drop_page_cache(folder)  # it keeps pages of files that are mapped, as they may be before this
                seconds = stopwatch.time(load)
                loads.check(name)
                if repetition:
                    rounds[name].append(seconds)
            keep(rounds, num_bytes, arguments, loads.left_out)
        report(rounds, num_bytes, stopwatch, arguments, loads.left_out)


def keep(
    rounds: dict[str, list[float]],
    num_bytes: int,
    arguments: argparse.Namespace,
    left_out: dict[str, str] | None = None,
) -> None:
    if not arguments.json:
        return
    facts = {"command": arguments.command, "machine": machine.facts(arguments.dir), "versions": machine.versions()}
    facts |= {"bytes": num_bytes, "ranks": arguments.ranks, "dim": arguments.dim, "device": arguments.device}
    arguments.json.write_text(json.dumps({**facts, "left_out": left_out or {}, "seconds": rounds}, indent=1) + "\n")


def report(
    rounds: dict[str, list[float]],
    num_bytes: int,
    stopwatch: Stopwatch,
    arguments: argparse.Namespace,
    left_out: dict[str, str] | None = None,
) -> None:
    where = (
        f"whole, to {arguments.device}"
        if arguments.ranks == 1
        else f"into FSDP2 on {arguments.ranks} gloo ranks, dim {arguments.dim}"
    )
    table = Table(title=f"{num_bytes / 1e9:.2f} GB of safetensors {where}")
    baseline, short = (WHOLE_BASELINE, "safetensors") if arguments.ranks == 1 else (BASELINE, "DCP")
    for column in ("", "s", "GB/s", f"x {short}"):
        table.add_column(column, justify="right" if column else "left")
    for name, seconds in rounds.items():
        median = statistics.median(seconds)
        ratio = statistics.median(other / own for other, own in zip(rounds[baseline], seconds, strict=True))
        table.add_row(name, f"{median:.3f}", f"{num_bytes / median / 1e9:.2f}", f"{ratio:.2f}")
    console = Console(highlight=False, width=130)
    console.print(table)
    for name, reason in (left_out or {}).items():
        console.print(f"{name} is left out: {reason}")
    console.print(machine.summary(machine.facts(arguments.dir)))
    console.print(f"{stopwatch.num_calls} calls timed; {stopwatch.busy_starts} began on a busy machine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks",
        type=int,
        choices=range(1, 17),
        metavar="N",
        help="1 to 16 (default 4; 1 on a GPU, where it cannot be more)",
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the model (default 1)")
    parser.add_argument("--dim", type=int, choices=(0, 1), default=0, help="dim along which it is sharded (default 0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add_arguments(parser)
    arguments = parser.parse_args()
    arguments.command = machine.command("load_hf.py", arguments, parser)
    if arguments.ranks is None:
        arguments.ranks = 4 if arguments.device == "cpu" else 1
    if arguments.device != "cpu":
        if arguments.ranks != 1:
            parser.error("--device cuda: one process loads the whole model; it takes --ranks 1")
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA device")
    with tempfile.TemporaryDirectory(prefix="load-hf-", dir=arguments.dir) as root:
        if arguments.ranks == 1:
            warnings.filterwarnings("ignore")
            run_whole(Path(root), arguments)
            bytecheckpoint.shutdown()
            return
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        mp.spawn(run_rank, (root, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
