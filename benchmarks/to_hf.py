#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes weights for Hugging Face of a checkpoint of torchtitan's llama3: ours, and torchtitan's own way.

torchtitan loads the checkpoint whole into its model's state dict, converts it by its state dict adapter (`to_hf`),
casts it, and saves it by DCP's `HuggingFaceStorageWriter`, which then joins its shards. Its model is built before, and
that time does not count. Ours is `convert` with a spec that has the adapter's names and its order of the rows of Q and
K; nothing of torchtitan is needed for it. Contenders take turns, in the other order each round, and every output is
compared bit for bit. DCP does not sync its files, so a sync is added. The ceiling is a disk that reads and writes as
many bytes as the weights have at the same time, with O_DIRECT.

    python benchmarks/to_hf.py --repetitions 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from convert import read_and_write
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache, sync_directories
from measurement.raw_disk import Disk, has_direct_io
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.models import llama3

from bytecheckpoint import LoadSpec, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.transforms import Reshape, Transpose

CEILING, TITAN, OURS = "disk, reading and writing", "torchtitan: to_hf and DCP's writer", "bcp convert --spec"
_VOCABULARY, _WIDTH, _HEADS, _KEY_HEADS, _LAYERS = 32000, 1024, 16, 4, 12  # 0.8 GB in float32


def model_config() -> Any:
    """Returns torchtitan's debug model, made larger, with fewer heads for keys than for queries."""
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = config.layers[0].attention.rope
    rope.dim = _WIDTH // _HEADS
    config.dim, config.vocab_size = _WIDTH, _VOCABULARY
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = _VOCABULARY, _WIDTH
    config.norm.normalized_shape = _WIDTH
    config.lm_head.in_features, config.lm_head.out_features = _WIDTH, _VOCABULARY
    config.layers = llama3._build_llama3_layers(
        n_layers=_LAYERS,
        dim=_WIDTH,
        n_heads=_HEADS,
        n_kv_heads=_KEY_HEADS,
        hidden_dim=llama3.compute_ffn_hidden_dim(_WIDTH, multiple_of=256),
        rope=rope,
        attn_backend="flex",
    )
    return config


def spec_of(adapter: Any) -> LoadSpec:
    """Returns the spec that does what the adapter does: other names, and halves of heads for pairs of neighbours."""
    names = {ours: theirs for theirs, ours in adapter.from_hf_map.items() if ours is not None}
    transforms: list[Reshape | Transpose] = []
    size = _WIDTH // _HEADS
    for name, heads in (("wq", _HEADS), ("wk", _KEY_HEADS)):
        key = f"layers.{{i}}.attention.qkv_linear.{name}.weight"
        transforms += [
            Reshape(key, shape=[heads, size // 2, 2, _WIDTH]),
            Transpose(key, dim0=1, dim1=2),
            Reshape(key, shape=[heads * size, _WIDTH]),
        ]
    rename = {ours.replace("{}", "{i}"): theirs.replace("{}", "{i}") for ours, theirs in names.items()}
    return LoadSpec(rename=rename, transforms=transforms)


def by_torchtitan(source: Path, target: Path, state: dict[str, torch.Tensor], adapter: Any, dtype: str) -> None:
    dcp.load(state, checkpoint_id=source, no_dist=True)
    of_hf = {name: value.to(getattr(torch, dtype)) for name, value in adapter.to_hf(state).items()}
    writer = HuggingFaceStorageWriter(
        path=str(target), save_distributed=True, enable_consolidation=True, thread_count_consolidation=2
    )
    dcp.save(of_hf, storage_writer=writer, no_dist=True)
    sync_directories(target)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def compare(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = weights_in(folder)
    if found.keys() != wanted.keys():
        sys.exit(f"{folder}: other tensors: {found.keys() ^ wanted.keys()}")
    for name, value in wanted.items():
        if found[name].dtype != value.dtype or not torch.equal(_bits(found[name]), _bits(value)):
            sys.exit(f"{folder}: '{name}' differs")


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def measure(arguments: argparse.Namespace, root: Path) -> tuple[dict[str, list[float]], int, int]:
    """Returns seconds by contender, and the bytes that are read and written."""
    source, raw, target = root / "checkpoint", root / "raw", root / "target"
    config = model_config()
    state: dict[str, torch.Tensor] = ModelWrapper(config.build()).state_dict()
    generator = torch.Generator().manual_seed(0)
    for value in state.values():
        value.detach().normal_(generator=generator)
    save_state_dict(source, state, no_dist=True)
    adapter = llama3.Llama3StateDictAdapter(config, None)
    dtype = getattr(torch, arguments.dtype)
    wanted = {name: value.to(dtype, copy=True) for name, value in adapter.to_hf(state).items()}
    num_read, num_written = (sum(value.nbytes for value in each.values()) for each in (state, wanted))
    disks = Disk(2), Disk(2)
    disks[1].write(raw, num_written)
    contenders: dict[str, Callable[[], object]] = {
        CEILING: partial(read_and_write, *disks, raw, target, num_written),
        TITAN: partial(by_torchtitan, source, target, state, adapter, arguments.dtype),
        OURS: partial(convert, source, target, spec=spec_of(adapter), dtype=arguments.dtype),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in contenders if repetition % 2 == 0 else reversed(contenders):
                drop_page_cache(source)
                for value in state.values():
                    value.detach().zero_()
                took = stopwatch.time(contenders[name])
                if target.is_dir():
                    compare(target, wanted)
                    shutil.rmtree(target)
                target.unlink(missing_ok=True)
                if repetition:
                    seconds[name].append(took)
    return seconds, num_read, num_written


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", help="dtype of the weights (default float32, as it is stored)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="to-hf-") as folder:
        seconds, num_read, num_written = measure(arguments, Path(folder))
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    console.print(f"{num_read / 1e9:.2f} GB in float32 to {num_written / 1e9:.2f} GB; {machine.summary(facts)}")
    table = Table()
    for column in ("", "s", "least", "most", "of torchtitan's"):
        table.add_column(column, justify="right" if column else "left")
    medians = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
    for name, s in medians.items():
        least, most = min(seconds[name]), max(seconds[name])
        table.add_row(name, f"{s:.3f}", f"{least:.3f}", f"{most:.3f}", f"{s / medians[TITAN]:.0%}")
    console.print(table)
    if arguments.json:
        report = {"command": machine.command("to_hf.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "bytes": [num_read, num_written], "seconds": seconds}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
