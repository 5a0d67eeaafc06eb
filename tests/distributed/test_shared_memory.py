# SPDX-License-Identifier: Apache-2.0
"""However units travel between the ranks of a shared load, each rank gets exactly what it wants."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.errors import StorageError
from bytecheckpoint.native import _C
from bytecheckpoint.sharing import memory as _memory
from bytecheckpoint.sharing.messages import PAYLOAD, TAKEN, PeerMessages
from distributed.shared_loads import COOPERATIVE, on_machines_of, replicated

DTYPES = [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64]
# Number of dims, and about how many elements.
TENSORS = [(1, 900), (2, 900_000), (2, 400_000), (3, 700_000), (3, 5_000), (2, 3_000_000)]


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for i, (num_dims, numel) in enumerate(TENSORS):
        shape = [random.randrange(1, 2 * int(numel ** (1 / num_dims))) for _ in range(num_dims - 1)]
        shape.insert(random.randrange(num_dims), max(1, numel // math.prod(shape)))
        dtype = random.choice(DTYPES)
        high = 2 if dtype == torch.bool else 120
        out[f"t{i}"] = torch.randint(0, high, shape, generator=generator).to(dtype)
    return out


def save_files(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Saves as Hugging Face does, in three files."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, folder / file)
        weight_map |= dict.fromkeys(names[number::3], file)
    index = str({"metadata": {}, "weight_map": weight_map}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(index)


def placed(full: torch.Tensor, random: Random) -> DTensor:
    """Distributes a tensor in a way that is drawn, the same on all ranks. Shards may be uneven, or empty."""
    ranks = dist.get_world_size()
    rows = random.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    mesh = init_device_mesh("cpu", (rows, ranks // rows))
    drawn: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(full.dim()) for _ in range(dim + 1))]
    return distribute_tensor(full, mesh, random.choices(drawn, k=2), src_data_rank=None)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def load_drawn(root: str, seeds: range, ranks_on_a_machine: int) -> Counter[int]:
    """Returns how many messages of each kind this rank has sent."""
    on_machines_of(ranks_on_a_machine)
    sent: Counter[int] = Counter()
    send = PeerMessages.send

    def counted(messages: Any, tensor: torch.Tensor, to: int, kind: int) -> Any:
        sent[kind] += 1
        return send(messages, tensor, to, kind)

    PeerMessages.send = counted  # type: ignore[method-assign]
    for seed in seeds:
        random = Random(seed)
        full = full_tensors(seed)
        wanted = {name: placed(value, random) for name, value in full.items()}
        for source in ("files", "ours"):
            got = {name: torch.zeros_like(value) for name, value in wanted.items()}
            reader = BcpReader(f"{root}/{seed}/{source}", config=COOPERATIVE)
            dcp.load(got, storage_reader=reader)
            assert reader.last_report is not None
            assert reader.last_report.reading == "cooperative"
            for name, value in wanted.items():
                assert torch.equal(bytes_of(got[name].to_local()), bytes_of(value.to_local())), (seed, source, name)
    return sent


@pytest.mark.parametrize(("num_ranks", "ranks_on_a_machine"), [(2, 2), (4, 4), (8, 8), (4, 1), (4, 2), (5, 3)])
def test_whatever_is_wanted_arrives_from_memory_and_by_message(
    tmp_path: Path, num_ranks: int, ranks_on_a_machine: int
) -> None:
    seeds = range(10 * num_ranks + ranks_on_a_machine, 10 * num_ranks + ranks_on_a_machine + 3)
    for seed in seeds:
        save_files(full_tensors(seed), tmp_path / str(seed) / "files")
        dcp.save(full_tensors(seed), storage_writer=BcpWriter(tmp_path / str(seed) / "ours"))
    sent = sum(run_ranks(num_ranks, load_drawn, str(tmp_path), seeds, ranks_on_a_machine), Counter[int]())
    assert (sent[TAKEN] > 0) == (ranks_on_a_machine > 1)
    assert (sent[PAYLOAD] > 0) == (ranks_on_a_machine < num_ranks)


def load_where_memory_is_refused(path: str, refuses: str) -> bool:
    """Returns whether this rank could use any memory of others."""
    opened: list[frozenset[int]] = []
    if refuses == "all":

        class Refused:
            def __init__(self, job: _C.LoadJob) -> None:
                raise StorageError("memfd_create(ring of slots): Function not implemented", "ring of slots", 38)

        _memory._C = type("Module", (), {"SharedMemory": Refused})  # type: ignore[assignment]
    elif refuses == "rank 1" and dist.get_rank() == 1:
        _memory.SharedMemory.made_for = classmethod(lambda cls, job: None)  # type: ignore[assignment,method-assign]
    elif refuses == "addresses":
        # As in a container that has the pids of another: something else is there, or nothing.
        place = _memory.MemoryPlace("here", (1, 1 << 20, 1, 1, 3))
        init = _memory.SharedMemory.__init__
        _memory.SharedMemory.__init__ = lambda self, engine, _: init(self, engine, place)  # type: ignore[method-assign]
    open_ = _memory.SharedMemory.open

    def open_and_note(memory: Any, rank: int, places: Any) -> None:
        open_(memory, rank, places)
        opened.append(memory.sources)

    _memory.SharedMemory.open = open_and_note  # type: ignore[method-assign]
    got = replicated(filled=False) | {"step": 0}
    dcp.load(got, storage_reader=BcpReader(path, config=COOPERATIVE))
    for key, value in replicated(filled=True).items():
        assert torch.equal(got[key], value)
    assert got["step"] == 7
    return any(opened)


@pytest.mark.parametrize(
    ("refuses", "uses_memory"),
    [
        ("none", [True] * 3),
        ("all", [False] * 3),
        ("rank 1", [True, False, True]),
        ("addresses", [False] * 3),
    ],
)
def test_units_are_sent_where_memory_cannot_be_shared(tmp_path: Path, refuses: str, uses_memory: list[bool]) -> None:
    dcp.save(replicated(filled=True) | {"step": 7}, storage_writer=BcpWriter(tmp_path))
    assert run_ranks(3, load_where_memory_is_refused, str(tmp_path), refuses) == uses_memory
