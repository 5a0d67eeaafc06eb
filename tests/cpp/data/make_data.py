# SPDX-License-Identifier: Apache-2.0
"""Writes what the C++ tests read of others: ``python tests/cpp/data/make_data.py``, made once with torch 2.13.

``*.metadata`` are pickles of DCP's Metadata, ``*.pt`` archives of torch.save. What is in them stands in
test_foreign_metadata.cpp, test_torch_archive.cpp and test_builtin_archive.cpp. ``make_data.py builtin`` writes what the
last of them reads, and nothing else.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import metadata as older
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.serialization import config

HERE = Path(__file__).parent
DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


def write(name: str, content: bytes) -> None:
    (HERE / name).write_bytes(content)
    print(f"{name}: {len(content)} bytes")


# --- metadata


def save_stock(rank: int, directory: str) -> None:
    """Two ranks, real ``dcp.save``: sharded, replicated, nested, objects."""
    os.chdir(directory)  # the path that is saved is then the same every time
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(4 * (3 - rank)).reshape(3 - rank, 4).to(torch.bfloat16)
    state = {
        "model": {
            "rows": DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size([5, 4]), stride=(4, 1)),
            "scalar": torch.tensor(0.5, dtype=torch.float64),
            "\u00e9\U0001f600": torch.zeros(2, 0, dtype=torch.int8),
        },
        "optimizer": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"params": [torch.ones(3)]}],
        "step": 7,
    }
    dcp.save(state, checkpoint_id="stock")
    dist.destroy_process_group()


def tensor(properties: Any, *chunks: tuple[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...]) -> Any:
    boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(properties, torch.Size(size), boxes)


def older_metadata() -> Metadata:
    """As versions of DCP wrote it that had neither storage meta nor version, and TensorProperties elsewhere."""
    properties = older.TensorProperties(torch.float16, memory_format=torch.preserve_format, requires_grad=True)
    metadata = Metadata(
        {"w": tensor(properties, ((0, 0), (2, 3)), ((2, 0), (2, 3)), size=(4, 3)), "extra": BytesStorageMetadata()},
        None,
        {
            MetadataIndex("w", (2, 0), 1): _StorageInfo("__1_0.distcp", 100, 50),
            MetadataIndex("w", (0, 0), 0): _StorageInfo("sub/__0_0.distcp", 0, 60),
            MetadataIndex("extra"): _StorageInfo("sub/__0_0.distcp", 60, 5),
        },
    )
    del metadata.storage_meta, metadata.version, metadata.planner_data
    return metadata


def olmo_metadata() -> Metadata:
    """With a storage info of a module that is not DCP's, and a field that DCP's has not."""
    name = "olmo_core.distributed.checkpoint.filesystem"
    for end in (9, 21, 32, len(name)):
        sys.modules[name[:end]] = types.ModuleType(name[:end])
    info_class = type("_StorageInfo", (), {"__module__": name})
    sys.modules[name]._StorageInfo = info_class  # type: ignore[attr-defined]
    info = info_class()
    vars(info).update(relative_path="__0_3.distcp", offset=1, length=2, compression=None)
    return Metadata(
        {"a": tensor(TensorProperties(torch.float32), ((0,), (4,)), size=(4,))},
        {"a": ("a",)},
        {MetadataIndex("a", (0,)): info},
        StorageMeta("s3://bucket/step7", "an id"),
    )


def dtypes_metadata() -> Metadata:
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    entries = {}
    for i, name in enumerate(DTYPES):
        dtype = getattr(torch, name.removeprefix("torch."))
        properties = TensorProperties(dtype, torch.strided, i % 2 == 1, formats[i % 3], i % 5 == 0)
        entries[name] = tensor(properties, ((), ()), size=())
    planner_data = {"kinds": [None, True, False, -1, 2**40, -(2**63), 0.5, "text", b"\x00\xff", b"x" * 300, (1, (2,))]}
    return Metadata(entries, planner_data, {}, StorageMeta(Path("/ckpt/step-7"), None, None, ["m"]), "1.0.0")


def transformed_metadata() -> Metadata:
    return Metadata(
        {"z": tensor(TensorProperties(torch.float32), ((0,), (4,)), size=(4,))},
        None,
        {MetadataIndex("z", (0,)): _StorageInfo("__0_0.distcp", 0, 9, ["stream.zstd"])},
    )


def sparse_metadata() -> Metadata:
    properties = TensorProperties(torch.float32, torch.sparse_coo)
    return Metadata({"s": tensor(properties, ((0,), (4,)), size=(4,))}, None, {})


def write_metadata() -> None:
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(save_stock, (directory,), nprocs=2)
        stock = (Path(directory) / "stock" / ".metadata").read_bytes()
    write("stock.metadata", stock)
    write("protocol2.metadata", pickle.dumps(pickle.loads(stock), 2))
    write("protocol5.metadata", pickle.dumps(pickle.loads(stock), 5))
    write("older.metadata", pickle.dumps(older_metadata(), 4))
    write("olmo.metadata", pickle.dumps(olmo_metadata(), 4))
    write("dtypes.metadata", pickle.dumps(dtypes_metadata(), 4))
    write("transformed.metadata", pickle.dumps(transformed_metadata(), 4))
    write("sparse.metadata", pickle.dumps(sparse_metadata(), 4))


# --- archives


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def rewritten(archive: bytes, *, compression: int = zipfile.ZIP_STORED, **changes: bytes) -> bytes:
    """The same entries, with other contents for some (by the last part of their names) or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(out, "w", compression) as target:
        for name in source.namelist():
            target.writestr(zipfile.ZipInfo(name), changes.get(name.split("/")[-1], source.read(name)), compression)
    return out.getvalue()


def write_archives() -> None:
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    write("plain.pt", saved(numbers))
    write("protocol4.pt", saved(numbers, pickle_protocol=4))
    write("float8.pt", saved(numbers.to(torch.float8_e4m3fn)))
    write("strided.pt", saved(numbers.to(torch.int16)[1:3, 1::2].t()))
    write("expanded.pt", saved(torch.tensor([3], dtype=torch.int64).expand(1000, 1000, 1)))
    write("conj.pt", saved(torch.tensor([1 + 2j, 3 - 4j]).conj()))
    write("neg.pt", saved(torch.tensor([1 + 2j, 3 - 4j]).conj().imag))
    write("empty.pt", saved(torch.empty(0, 3, dtype=torch.uint16)))
    write("scalar.pt", saved(torch.tensor(True)))
    write("parameter.pt", saved(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))))
    write("large.pt", saved(torch.arange(20000).to(torch.uint8)))
    config.save.storage_alignment = 4096
    write("aligned.pt", saved(numbers))
    config.save.storage_alignment = 64
    torch.serialization.set_crc32_options(False)
    write("no_crc.pt", saved(numbers))
    torch.serialization.set_crc32_options(True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "prefix.bin"
        torch.save(numbers, path)
        write("named.pt", path.read_bytes())
    write("older.pt", rewritten(saved(numbers)))  # headers and padding of another writer
    # Left to torch.load.
    write("big_endian.pt", rewritten(saved(numbers), byteorder=b"big"))
    write("compressed.pt", rewritten(saved(numbers), compression=zipfile.ZIP_DEFLATED))
    write("quantized.pt", saved(torch.quantize_per_tensor(numbers, 0.5, 3, torch.quint8)))
    write("sparse.pt", saved(torch.eye(3).to_sparse()))
    write("two.pt", saved([numbers, numbers + 1]))
    write("objects.pt", saved({"step": 7, "set": {1, 2}}))
    with_attribute = torch.ones(2)
    with_attribute.note = "kept"  # type: ignore[attr-defined]
    write("attribute.pt", saved(with_attribute))
    write("meta.pt", saved(torch.empty(3, device="meta")))
    write("legacy.pt", saved(numbers, _use_new_zipfile_serialization=False))


BUILTIN = {
    "lr": 0.001,
    "betas": (0.9, 0.95),
    "amsgrad": False,
    "fused": True,
    "foreach": None,
    "\u00e9": {-1: -0.0, (): None},
    "params": [0, 300, 70000, -(2**63), float("inf")],
    "raw": b"\x00\xff",
    "empty": [],
    "lr again": "lr",
}


def write_builtin_archives() -> None:
    write("builtin.pt", saved(BUILTIN))
    write("builtin_protocol4.pt", saved(BUILTIN, pickle_protocol=4))
    write("builtin_older.pt", rewritten(saved(BUILTIN)))
    torch.serialization.set_crc32_options(False)
    write("builtin_no_crc.pt", saved(BUILTIN))
    torch.serialization.set_crc32_options(True)
    # Left to torch.load.
    write("builtin_big_endian.pt", rewritten(saved(BUILTIN), byteorder=b"big"))
    write("builtin_compressed.pt", rewritten(saved(BUILTIN), compression=zipfile.ZIP_DEFLATED))
    empty: list[int] = []
    write("builtin_shared.pt", saved([empty, empty]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write_builtin_archives()
    if sys.argv[1:] == ["builtin"]:
        sys.exit()
    write_metadata()
    write_archives()
