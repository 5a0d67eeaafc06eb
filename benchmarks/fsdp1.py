#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saves and loads FSDP1's flat parameters: FSDP's own sharded state dict, decomposed boxes, merged blocks.

A model with AdamW states runs on several gloo ranks of one machine. FSDP's own state dict gathers each flat parameter
before it is written or filled; the other contenders do not. Contenders take turns, in another order each round. A call
begins for all ranks at once and ends with the last. Models: `transformer`, matrices of many rows; `conv`, kernels of
four dims, which a cut splits into up to seven boxes; `embedding`, one matrix that is cut over all ranks. Every load is
compared.

    python benchmarks/fsdp1.py transformer
    python benchmarks/fsdp1.py conv --ranks 8 --gigabytes 0.3
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache, sync_directories
from measurement.stock_dcp import stock_dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import bytecheckpoint
from bytecheckpoint.native import _core

BASELINE = "FSDP's state dict, DCP"
_BYTES_AN_ELEMENT = 12  # the parameter and AdamW's two states
_LAYERS = 8


class Layer(nn.Module):
    """The module that FSDP wraps. Its sizes are odd, so shards are cut within rows."""

    def __init__(self, kind: str, elements: int) -> None:
        super().__init__()
        if kind == "transformer":
            width = int((elements / 12) ** 0.5) | 1
            shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,)]
        elif kind == "conv":
            width = 63
            shapes = [(width, width, 3, 3)] * max(1, elements // (width * width * 9))
        else:
            width = 1023
            shapes = [(max(8, elements // width), width)]
        self.parameters_ = nn.ParameterList(nn.Parameter(torch.rand(shape)) for shape in shapes)


class Model(nn.Module):
    """A model of layers with ``elements`` elements together."""

    def __init__(self, kind: str, elements: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, elements // _LAYERS) for _ in range(_LAYERS))


def make_state(kind: str, elements: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a wrapped model and an optimizer with states, all with known content."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Model(kind, elements),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        if parameter.numel() > 0:
            parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


State = tuple[nn.Module, torch.optim.Optimizer]
Save = Callable[[State, Path], Any]


def save_gathered(state: State, path: Path, *, is_ours: bool) -> None:
    model, optimizer = get_state_dict(*state)
    values = {"model": model, "optimizer": optimizer}
    if is_ours:
        writer = bytecheckpoint.BcpWriter(path)
        dcp.save(values, storage_writer=writer, planner=bytecheckpoint.BcpSavePlanner())
        return
    with stock_dcp():
        dcp.save(values, storage_writer=dcp.FileSystemWriter(path, thread_count=2))
    if dist.get_rank() == 0:
        sync_directories(path)


def load_gathered(state: State, path: Path, *, is_ours: bool) -> None:
    model, optimizer = get_state_dict(*state)
    values = {"model": model, "optimizer": optimizer}
    if is_ours:
        reader = bytecheckpoint.BcpReader(path)
        dcp.load(values, storage_reader=reader, planner=bytecheckpoint.BcpLoadPlanner())
    else:
        with stock_dcp():
            dcp.load(values, storage_reader=dcp.FileSystemReader(path))
    set_state_dict(*state, model_state_dict=values["model"], optim_state_dict=values["optimizer"])


def save_ours(state: State, path: Path, *, irregular: str, fast_saving: bool = False) -> Any:
    parts = {"model": state[0], "optimizer": state[1]}
    return bytecheckpoint.save(path, parts, "fsdp", fast_saving, irregular=irregular)


def load_ours(state: State, path: Path) -> None:
    bytecheckpoint.load(path, {"model": state[0], "optimizer": state[1]}, "fsdp")


CONTENDERS: dict[str, tuple[Save, Callable[[State, Path], None]]] = {
    BASELINE: (partial(save_gathered, is_ours=False), partial(load_gathered, is_ours=False)),
    "FSDP's state dict, ours": (partial(save_gathered, is_ours=True), partial(load_gathered, is_ours=True)),
    "decompose": (partial(save_ours, irregular="decompose"), load_ours),
    "exchange": (partial(save_ours, irregular="exchange"), load_ours),
    "decompose, fast_saving": (partial(save_ours, irregular="decompose", fast_saving=True), load_ours),
    "exchange, fast_saving": (partial(save_ours, irregular="exchange", fast_saving=True), load_ours),
}


def tensors_of(state: State) -> list[torch.Tensor]:
    model, optimizer = state
    states = [value for of_parameter in optimizer.state.values() for value in of_parameter.values()]
    return [parameter.data for parameter in model.parameters()] + states


def one_round(name: str, state: State, path: Path, stopwatch: Stopwatch | None) -> dict[str, float]:
    """Returns the seconds until the save returns, until it is committed, and of the load.

    The last rank's end counts.
    """
    save, load = CONTENDERS[name]
    figures = {}
    with stopwatch.conditions() if stopwatch is not None else nullcontext():
        dist.barrier()
        begin = time.perf_counter()
        handle = save(state, path)
        dist.barrier()
        figures["returns"] = time.perf_counter() - begin
        if handle is not None:
            handle.committed.result()
        dist.barrier()
        figures["committed"] = time.perf_counter() - begin
    if dist.get_rank() == 0:
        drop_page_cache(path)
        marks = [*path.rglob(".metadata")]
        figures["metadata"] = float(sum(mark.stat().st_size for mark in marks))
        figures["chunks"] = float(sum(len(c) for m in marks for c in _core.Checkpoint.open(str(m.parent)).chunks()))
    tensors = tensors_of(state)
    wanted = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    with stopwatch.conditions() if stopwatch is not None else nullcontext():
        dist.barrier()
        begin = time.perf_counter()
        load(state, path)
        dist.barrier()
        figures["load"] = time.perf_counter() - begin
    if not all(map(torch.equal, tensors_of(state), wanted)):
        raise AssertionError(f"{name}: rank {dist.get_rank()} has other bytes than were saved")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return figures


def run_rank(rank: int, root: str, arguments: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=arguments.ranks)
    state = make_state(arguments.model, int(arguments.gigabytes * 1e9) // _BYTES_AN_ELEMENT)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS if name in arguments.only}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) if rank == 0 else nullcontext() as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in random.Random(repetition).sample(list(rounds), len(rounds)):
                figures = one_round(name, state, Path(root) / "checkpoint", stopwatch)
                if repetition:
                    rounds[name].append(figures)
        if stopwatch is not None:
            report(rounds, stopwatch, arguments)
    bytecheckpoint.shutdown()
    dist.destroy_process_group()


def report(rounds: dict[str, list[dict[str, float]]], stopwatch: Stopwatch, arguments: argparse.Namespace) -> None:
    title = f"{arguments.model}, {arguments.gigabytes:g} GB with AdamW, FSDP1 on {arguments.ranks} gloo ranks"
    table = Table(title=title)
    columns = ("", "save returns, s", "committed, s", "x DCP", "load, s", "x DCP", "chunks", ".metadata, kB")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    medians = {
        name: {key: statistics.median(figures[key] for figures in all_rounds) for key in all_rounds[0]}
        for name, all_rounds in rounds.items()
    }
    for name, figures in medians.items():
        ratios = {
            key: statistics.median(
                theirs[key] / ours[key] for theirs, ours in zip(rounds[BASELINE], rounds[name], strict=True)
            )
            for key in ("committed", "load")
        }
        cells = [
            *(f"{figures['returns']:.3f}", f"{figures['committed']:.3f}", f"{ratios['committed']:.2f}"),
            *(f"{figures['load']:.3f}", f"{ratios['load']:.2f}"),
            *(f"{figures['chunks']:,.0f}", f"{figures['metadata'] / 1e3:,.0f}"),
        ]
        table.add_row(name, *cells)
    console = Console(highlight=False, width=130)
    console.print(table)
    console.print(f"{stopwatch.num_calls} calls timed; {stopwatch.busy_starts} began on a busy machine")
    if arguments.json:
        facts = {
            "machine": machine.facts(arguments.dir),
            "model": arguments.model,
            "ranks": arguments.ranks,
            "gigabytes": arguments.gigabytes,
            "rounds": rounds,
            "num_calls": stopwatch.num_calls,
            "busy_starts": stopwatch.busy_starts,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("transformer", "conv", "embedding"), help="what is sharded")
    parser.add_argument("--ranks", type=int, choices=range(2, 17), default=4, metavar="N", help="2 to 16 (default 4)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of model and states (default 1)")
    parser.add_argument("--only", help=f"contenders between semicolons, beside {BASELINE}: {'; '.join(CONTENDERS)}")
    add_arguments(parser)
    arguments = parser.parse_args()
    named = [*CONTENDERS] if arguments.only is None else [name.strip() for name in arguments.only.split(";")]
    unknown = [name for name in named if name not in CONTENDERS]
    if unknown:
        parser.error(f"--only: there is no {'; '.join(unknown)}")
    arguments.only = {BASELINE, *named}
    with tempfile.TemporaryDirectory(prefix="fsdp1-", dir=arguments.dir) as root:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        mp.spawn(run_rank, (root, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
