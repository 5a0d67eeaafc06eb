# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-Core, verl and DeepSpeed (ZeRO-3) to safetensors, beside the disk and their own tools.

A model of Qwen2 is written as each of them does, by two ranks: layers stacked by stock DCP, a file of DTensors for each
rank, and a flat group of each rank with both moments. Each is converted to a folder of Hugging Face, from a cold cache
and to durable files; the tools do not sync, so a sync is added.

The ceiling is a disk that reads as much as the weights have and writes as much, with O_DIRECT. It is compared with a
conversion in a process that has imported all it needs, and the tools with `bcp convert`, both with the start of their
process. Memory is what a process adds after its imports.

    python benchmarks/foreign_sources.py --tools PYTHON

PYTHON is an interpreter whose environment has the tools: verl 0.9.1, deepspeed 0.19.8, transformers and accelerate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from convert import CEILING, read_and_write, remove
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache, sync_directories
from measurement.raw_disk import Disk, has_direct_io
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import LoadSpec, model_specs
from bytecheckpoint.convert import convert

NUM_RANKS = 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MEMORY = """
import runpy, sys
def peak_kib():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0])
for name in sys.argv[1].split(","):
    __import__(name)
before = peak_kib()
sys.argv = sys.argv[2:]
try:
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print(f"\\nadded {peak_kib() - before}")
"""
# What each tool imports before it looks at a checkpoint.
IMPORTS = {
    "bytecheckpoint": "bytecheckpoint.cli.app",
    "verl": "verl.model_merger.fsdp_model_merger",
    "deepspeed": "deepspeed",
}


def weights(num_layers: int) -> dict[str, torch.Tensor]:
    """Returns a model of Hugging Face, of random float32."""
    hidden, inner, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    kv = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    made = {"model.embed_tokens.weight": torch.randn(vocabulary, hidden)}
    for layer in range(num_layers):
        shapes = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        made |= {f"model.layers.{layer}.{name}": torch.randn(*shape) for name, shape in shapes.items()}
    return made | {"model.norm.weight": torch.randn(hidden), "lm_head.weight": torch.randn(vocabulary, hidden)}


def write_of_rank(root: Path) -> None:
    """Writes what one of two ranks of Megatron-Core and of verl writes. Called by each, below torchrun."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))
    stacked = bytecheckpoint.read(root / "stacked")
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in stacked.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(root / "Megatron-Core", thread_count=2))
    whole = bytecheckpoint.read(root / "model")
    shards = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    torch.save(shards, root / "verl" / f"model_world_size_{NUM_RANKS}_rank_{dist.get_rank()}.pt")
    dist.destroy_process_group()


def write_zero(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    """Writes a step of ZeRO-3, as DeepSpeed 0.19 does: of each parameter a rank has an equal part."""
    step = folder / "global_step1"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    parts = {name: -(-value.numel() // NUM_RANKS) for name, value in whole.items()}
    for rank in range(NUM_RANKS):
        flat = torch.zeros(sum(parts.values()))
        at = 0
        for name, value in whole.items():
            of_rank = value.reshape(-1)[rank * parts[name] : (rank + 1) * parts[name]]
            flat[at : at + of_rank.numel()] = of_rank
            at += parts[name]
        moments = {"step": 1, "exp_avg": torch.zeros_like(flat), "exp_avg_sq": torch.zeros_like(flat)}
        model = {
            "module": {name: torch.zeros(0) for name in whole},
            "buffer_names": [],
            "param_shapes": [{name: value.shape for name, value in whole.items()}],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "ds_version": "0.19.8",
            "ds_config": {},
            "dp_world_size": NUM_RANKS,
            "mp_world_size": 1,
            "global_steps": 1,
        }
        torch.save(model, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        groups = [{"lr": 1e-3, "params": [0]}]
        optimizer = {
            "zero_stage": 3,
            "partition_count": NUM_RANKS,
            "fp32_flat_groups": [flat],
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": groups},
        }
        written = {"optimizer_state_dict": optimizer, "ds_version": "0.19.8", "ds_config": {}}
        torch.save(written, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def write_sources(root: Path, gigabytes: float) -> int:
    """Writes the model as each of them does. Returns its bytes."""
    of_layer = sum(value.nbytes for name, value in weights(1).items() if ".layers." in name)
    num_layers = max(1, round((gigabytes * 1e9 - sum(value.nbytes for value in weights(0).values())) / of_layer))
    CONFIG["num_hidden_layers"] = num_layers
    whole = weights(num_layers)
    model = root / "model"
    model.mkdir()
    save_file(whole, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(CONFIG))
    spec = model_specs.megatron(CONFIG, to="megatron")
    convert(model, root / "stacked", to="dcp", spec=spec)
    model_specs.megatron(CONFIG, to="hugging_face").to_file(root / "from_megatron.toml")
    (root / "from_deepspeed.toml").write_text('include = ["module"]\n\n[rename]\nmodule = ""\n')
    of_verl = root / "verl" / "huggingface"
    of_verl.mkdir(parents=True)
    (of_verl / "config.json").write_text(json.dumps(CONFIG))
    (root / "verl" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": NUM_RANKS}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, __file__, "--write", str(root)], check=True, env=environment)
    write_zero(root / "DeepSpeed", whole)
    remove(root / "stacked")
    return sum(value.nbytes for value in whole.values())


def converted(root: Path, source: str, spec: str, target: Path) -> None:
    convert(root / source, target, spec=LoadSpec.from_file(root / spec) if spec else None, hf_config=root / "model")


def run(command: list[Any], target: Path | None) -> None:
    """Runs a tool, and makes what it wrote durable."""
    ended = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{command}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    if target is not None:
        sync_directories(target)


def added_memory(python: str, tool: str, command: list[Any], target: Path) -> int:
    """Returns the KiB that a tool adds to its process after its imports."""
    whole = [python, "-c", MEMORY, IMPORTS[tool], *map(str, command)]
    ended = subprocess.run(whole, check=True, capture_output=True, text=True)
    remove(target)
    return int(ended.stdout.rpartition("\nadded ")[2])


def commands(root: Path, target: Path, python: str | None) -> dict[str, tuple[str, str, list[Any]]]:
    """Returns by name the interpreter, the tool, and its arguments."""
    ours: list[Any] = ["bytecheckpoint", "convert"]
    config: list[Any] = ["--hf-config", root / "model"]
    found: dict[str, tuple[str, str, list[Any]]] = {
        f"{name}, bcp": (sys.executable, "bytecheckpoint", [*ours, root / name, target, *config, *more])
        for name, more in (
            ("Megatron-Core", ["--spec", root / "from_megatron.toml"]),
            ("verl", []),
            ("DeepSpeed", ["--spec", root / "from_deepspeed.toml"]),
        )
    }
    if python is None:
        return found
    of_verl = ["--backend", "fsdp", "--local_dir", root / "verl", "--target_dir", target]
    found["verl, its merger"] = (python, "verl", ["verl.model_merger", "merge", *of_verl])
    where = "import importlib.util as u; print(u.find_spec('deepspeed').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    # DeepSpeed copies it, too: beside it is a module `types`.
    shutil.copy(Path(package, "utils", "zero_to_fp32.py"), root)
    of_deepspeed = [root / "zero_to_fp32.py", root / "DeepSpeed", target, "--safe_serialization"]
    found["DeepSpeed, zero_to_fp32.py"] = (python, "deepspeed", of_deepspeed)
    return found


def measure(arguments: argparse.Namespace, root: Path) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """Returns seconds and added KiB by contender, and the bytes of the weights."""
    raw, target = root / "raw", root / "target"
    num_bytes = write_sources(root, arguments.gigabytes)
    disks = Disk(2), Disk(2)
    disks[1].write(raw, num_bytes)
    tools = commands(root, target, arguments.tools)
    added = {name: added_memory(python, tool, command, target) for name, (python, tool, command) in tools.items()}
    contenders: dict[str, Callable[[], None]] = {
        CEILING: partial(read_and_write, *disks, raw, target, num_bytes),
        "Megatron-Core": partial(converted, root, "Megatron-Core", "from_megatron.toml", target),
        "verl": partial(converted, root, "verl", "", target),
        "DeepSpeed": partial(converted, root, "DeepSpeed", "from_deepspeed.toml", target),
    }
    for name, (python, tool, command) in tools.items():
        start = [python] if str(command[0]).endswith(".py") else [python, "-m"]
        contenders[name] = partial(run, [*start, *command], None if tool == "bytecheckpoint" else target)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in contenders if repetition % 2 == 0 else reversed(contenders):
                for source in ("Megatron-Core", "verl", "DeepSpeed"):
                    drop_page_cache(root / source)
                took = stopwatch.time(contenders[name])
                remove(target)
                if repetition:
                    seconds[name].append(took)
    return seconds, added, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights (default: 1)")
    parser.add_argument("--tools", help="an interpreter that has verl and deepspeed; without it ours alone is measured")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.write is not None:
        return write_of_rank(arguments.write)
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="foreign-") as folder:
        seconds, added, num_bytes = measure(arguments, Path(folder))
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    console.print(f"{num_bytes / 1e9:.2f} GB of weights in float32, of two ranks; {machine.summary(facts)}")
    medians = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
    table = Table()
    for column in ("", "s", "GB/s", "of the ceiling", "added MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, s in medians.items():
        share = f"{medians[CEILING] / s:.0%}" if name != CEILING else ""
        memory = f"{added[name] >> 10}" if name in added else ""
        table.add_row(name, f"{s:.3f}", f"{num_bytes / s / 1e9:.2f}", share, memory)
    console.print(table)
    if arguments.json:
        report = {"command": machine.command("foreign_sources.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "bytes": num_bytes, "seconds": seconds, "added_kib": added}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
