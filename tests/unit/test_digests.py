# SPDX-License-Identifier: Apache-2.0
"""Tests ``digest``: the same for the same values, whatever shards, files and format.

A digest is computed here as docs/internals/digest_form.md says.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.dtypes import NAMES
from support.peak_memory import with_peak
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from unit.dcp_by_hand import cut, save_by_hand
from unit.partial_states import save_incomplete

from bytecheckpoint import BcpWriter, LoadSpec, digest, save_state_dict
from bytecheckpoint.checkpoint import digests
from bytecheckpoint.checkpoint.canonical import canonical
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.transforms import Stack, Transpose

MIB = 1 << 20


def of_tensor(tensor: torch.Tensor) -> str:
    """Computes a digest of a tensor as docs/internals/digest_form.md says, of the tensor alone."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    whole = hashlib.sha256(f"tensor {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
    for begin in range(0, len(data), MIB):
        whole.update(hashlib.sha256(data[begin : begin + MIB]).digest())
    return whole.hexdigest()


def of_all(keys: dict[str, str]) -> str:
    whole = hashlib.sha256(b"keys\n")
    for name in sorted(keys, key=str.encode):
        whole.update(hashlib.sha256(name.encode()).digest() + bytes.fromhex(keys[name]))
    return whole.hexdigest()


def stock_save(path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of sizes around those of blocks and buffers, and of special values."""
    generator = torch.Generator().manual_seed(5)
    nan = torch.tensor([0x7FC00001, 0x7FC00002, -0x80000000, 0], dtype=torch.int32).view(torch.float32)
    return {
        "large": torch.randn(3001, 1999, generator=generator),  # 23 MiB: more than a buffer
        "block": torch.arange(MIB, dtype=torch.uint8),
        "block and one": torch.arange(MIB + 1, dtype=torch.uint8),
        "half": torch.randn(777, 1001, generator=generator).to(torch.bfloat16),
        "complex": torch.randn(70_000, generator=generator, dtype=torch.complex128),
        "nan": nan,
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "one": torch.ones(1, dtype=torch.bool),
    }


def test_as_documented(tmp_path: Path) -> None:
    state = tensors()
    save_state_dict(tmp_path, state)
    found = digest(tmp_path)
    assert dict(found.keys) == {name: of_tensor(tensor) for name, tensor in sorted(state.items())}
    assert found.total == of_all(dict(found.keys))
    assert found.num_bytes == sum(tensor.nbytes for tensor in state.values())
    assert found.as_stored == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype).reshape(1, -1)
    save_state_dict(tmp_path, {"t": tensor})
    assert digest(tmp_path).keys["t"] == of_tensor(tensor)


def test_every_bit_counts(tmp_path: Path) -> None:
    state = tensors()
    save_state_dict(tmp_path / "a", state)
    before = digest(tmp_path / "a")
    seen = {before.total}
    for name, at in (("large", -1), ("block and one", MIB), ("nan", 2), ("half", 5)):
        changed = {key: tensor.clone() for key, tensor in state.items()}
        changed[name].view(-1).view(torch.uint8)[at] ^= 1
        save_state_dict(tmp_path / "b", changed)
        after = digest(tmp_path / "b")
        assert {key for key in state if after.keys[key] != before.keys[key]} == {name}
        seen.add(after.total)
    # The same bytes in another shape, in another dtype, and under another name.
    for other in ({"nan": state["nan"].view(2, 2)}, {"nan": state["nan"].view(torch.int32)}):
        save_state_dict(tmp_path / "b", {**state, **other})
        seen.add(digest(tmp_path / "b").total)
    save_state_dict(tmp_path / "b", {"other" if key == "one" else key: tensor for key, tensor in state.items()})
    renamed = digest(tmp_path / "b")
    assert renamed.keys["other"] == before.keys["one"]
    seen.add(renamed.total)
    assert len(seen) == 8


def test_shards_files_and_formats_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors()
    save_state_dict(tmp_path / "ours", state)
    whole = digest(tmp_path / "ours")
    save_by_hand(cut(state, 3), tmp_path / "shards")  # cut between three ranks
    assert max(_core.Checkpoint.open(str(tmp_path / "shards")).contents(), key=lambda item: item[5])[5] > 1
    dcp.save(state, storage_writer=BcpWriter(tmp_path / "files", single_file_per_rank=False), no_dist=True)
    stock_save(tmp_path / "stock", state)
    save_file({name: tensor for name, tensor in state.items() if name != "complex"}, tmp_path / "all.safetensors")
    convert(tmp_path / "ours", tmp_path / "hf", spec=LoadSpec(exclude="complex"), shard_size="4MiB")
    for name in ("shards", "files", "stock"):
        found = digest(tmp_path / name)
        assert (found.total, found.keys) == (whole.total, whole.keys), name
    of_file, of_folder = digest(tmp_path / "all.safetensors"), digest(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    assert of_file.total == of_folder.total == digest(tmp_path / "ours", spec=LoadSpec(exclude="complex")).total
    assert {**of_file.keys, "complex": whole.keys["complex"]} == whole.keys
    monkeypatch.setattr(digests, "_BUFFER_BYTES", 2 * MIB)  # so that every tensor is cut
    assert digest(tmp_path / "shards").total == whole.total


def test_spec(tmp_path: Path) -> None:
    state = {"model": {f"e.{i}.w": torch.full((3, 5), float(i)) for i in range(4)}, "step": 3}
    save_state_dict(tmp_path / "a", state)
    stacked = torch.stack([*state["model"].values()])
    spec = LoadSpec(
        include="model",
        rename={"model": ""},
        transforms=[Stack("model.e.{i}.w", "model.w"), Transpose("model.w", dim0=0, dim1=2)],
    )
    save_state_dict(tmp_path / "b", {"w": stacked.transpose(0, 2)})
    assert digest(tmp_path / "a", spec=spec).total == digest(tmp_path / "b").total
    with pytest.raises(ConfigError, match="matches no key"):
        digest(tmp_path / "a", spec=LoadSpec(include="typo"))


OBJECTS: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**62, -(2**63)],
    "big": -(10**50),
    "floats": [0.0, -0.0, 1e-300, math.inf, math.nan],
    "complex": complex(1, -2),
    "text": "a\0\u00e9\U0001f600",
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"abc"),
    "nested": {"a": [1, (2, {"b": None})], 3: "x", (1, 2): []},
    "set": {3, 1, 2, "x"},
    "frozen": frozenset({1.5, None}),
    "ordered": collections.OrderedDict(b=1, a=2),
    "long": list(range(5000)),
}


def test_objects_of_builtin_types(tmp_path: Path) -> None:
    """The same value has one digest, whether C++ or Python has pickled it; no two of these have the same."""
    state = {f"k.{name}": value for name, value in OBJECTS.items()}
    flat = {key: [value] if isinstance(value, dict) else value for key, value in state.items()}
    save_state_dict(tmp_path / "a", flat)
    stock_save(tmp_path / "b", flat)
    a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
    assert a.as_stored == b.as_stored == ()
    assert (a.keys, a.total) == (b.keys, b.total)
    assert len(set(a.keys.values())) == len(a.keys) >= len(OBJECTS)
    assert a.keys["k.none"] == hashlib.sha256(b"object\nN").hexdigest()


def test_canonical_forms() -> None:
    assert (
        canonical([None, True, -255, 1.0, "\u00e9", b"x"])
        == b"l6:NTi-ff;f" + struct.pack("<d", 1.0) + b"s2:\xc3\xa9b1:x"
    )
    assert canonical({"b": (), "a": {2, 1}}) == b"d2:s1:bt0:s1:ae2:i1;i2;"
    assert canonical(collections.OrderedDict(a=complex(0, 1))) == b"o1:s1:ac" + struct.pack("<dd", 0, 1)
    forms = [canonical(value) for value in OBJECTS.values()]
    assert None not in forms
    assert len(set(forms)) == len(forms)
    alike = [0, False, 0.0, -0.0, "", b"", bytearray(), (), [], {}, set(), frozenset(), None, 0j, "0", [[]], ([],)]
    assert len({canonical(value) for value in alike}) == len(alike)
    assert canonical({"a": 1, "b": 2}) != canonical({"b": 2, "a": 1})
    assert canonical({"a": {3, 1, 2}}) == canonical({"a": {2, 3, 1}})
    for other in (datetime.date(2020, 1, 1), torch.ones(1), [object()], {"a": {datetime.date(2020, 1, 1)}}):
        assert canonical(other) is None


def test_other_objects_count_as_they_are_stored(tmp_path: Path) -> None:
    state = {"when": datetime.date(2020, 1, 2), "t": torch.ones(2), "step": 3}
    save_state_dict(tmp_path / "a", state)
    save_state_dict(tmp_path / "b", state)
    stock_save(tmp_path / "stock", state)
    a, b, stock = digest(tmp_path / "a"), digest(tmp_path / "b"), digest(tmp_path / "stock")
    assert a.as_stored == ("when",)
    assert a.total == b.total
    assert a.keys["step"] == stock.keys["step"]
    checkpoint = _core.Checkpoint.open(str(tmp_path / "a"))
    item = next(i for i, (name, *_) in enumerate(checkpoint.contents()) if name == "when")
    _, _, file, offset, size = checkpoint.chunks()[item][0]
    assert file is not None
    record = (tmp_path / "a" / file).read_bytes()[offset : offset + size]
    assert a.keys["when"] == hashlib.sha256(b"stored\n" + record).hexdigest()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        digest(tmp_path / "none")
    save_incomplete(tmp_path / "gap")
    with pytest.raises(UnsupportedError, match=r"digest\(.*gap\): 'w': some of its elements are in no chunk"):
        digest(tmp_path / "gap")
    odd = torch.quantize_per_tensor(torch.arange(24.0).reshape(4, 6), 0.5, 3, torch.quint8)
    save_state_dict(tmp_path / "q", {"q": odd, "w": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="'q': it is not stored as plain elements; it can be left out with"):
        digest(tmp_path / "q")
    assert [*digest(tmp_path / "q", spec=LoadSpec(exclude="q")).keys] == ["w"]


@pytest.mark.parametrize("key", ["w", "o"])
def test_damage_is_an_error(tmp_path: Path, key: str) -> None:
    save_state_dict(tmp_path, {"w": torch.arange(1000.0), "o": [*range(1000)]})
    checkpoint = _core.Checkpoint.open(str(tmp_path))
    item = checkpoint.names().index(key)
    _, _, file, offset, size = checkpoint.chunks()[item][0]
    assert file is not None
    with (tmp_path / file).open("r+b") as damaged:
        damaged.seek(offset + size // 2)
        byte = damaged.read(1)
        damaged.seek(-1, 1)
        damaged.write(bytes([byte[0] ^ 4]))
    with pytest.raises(CorruptCheckpointError):
        digest(tmp_path)


def test_a_stored_dtype_that_is_not_the_declared_one(tmp_path: Path) -> None:
    """What counts is what is stored."""
    value = torch.arange(6.0)

    class Narrower(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).half()

    dcp.save({"t": value}, storage_writer=BcpWriter(tmp_path), planner=Narrower(), no_dist=True)
    assert digest(tmp_path).keys["t"] == of_tensor(value.half())


def test_memory_and_progress(tmp_path: Path) -> None:
    """Memory does not grow with a tensor; progress goes from nothing to everything."""
    whole = torch.empty(60 * MIB, dtype=torch.float32).normal_(generator=torch.Generator().manual_seed(1))
    save_state_dict(tmp_path, {"t": whole, "o": 1})
    wanted = of_tensor(whole)
    del whole
    digest(tmp_path)
    told: list[tuple[int, int]] = []
    found, peak = with_peak(lambda: digest(tmp_path, progress=lambda done, total: told.append((done, total))))
    assert found.keys["t"] == wanted
    assert peak < 80 * MIB, peak >> 20
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] == found.num_bytes
    assert told == sorted(told)
    assert len(told) > 10


def test_an_error_of_progress_ends_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"t": torch.zeros(40 * MIB, dtype=torch.uint8)})

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        digest(tmp_path, progress=stop)
