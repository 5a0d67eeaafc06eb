# SPDX-License-Identifier: Apache-2.0
"""Tests that checkpoints of stock DCP from many versions of torch load, and that we read the same metadata as stock."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, blank, local_tensors, settled, without_strides
from support.goldens import GOLDEN as GOLDENS
from support.ranks import failures, run_ranks
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from bytecheckpoint import BcpReader, verify
from bytecheckpoint.errors import UnsafeObjectError, UnsupportedError
from bytecheckpoint.native import _core
from interop.stock_states import Tagged, Version, as_saved, laid_out, state_of

GOLDEN = GOLDENS / "stock"


def kind_of(name: str) -> str:
    return name.split("-")[1]


def version_of(name: str) -> Version:
    major, minor = name.split("-")[0].split(".")[:2]
    return int(major), int(minor)


NAMES = sorted(entry.name for entry in GOLDEN.iterdir())
LOADED_AS_ONE = [
    name
    for name in NAMES
    if kind_of(name) not in ("no_collectives", "subclass", "wrapper", "compressed", "safetensors")
]
RANKED = [name for name in NAMES if kind_of(name) in ("sharded", "mesh")]
PLAIN = [name for name in NAMES if kind_of(name) == "plain"]
UNCOORDINATED = [name for name in NAMES if kind_of(name) == "no_collectives"]

# All opcodes and globals in the pickles of these metadata.
OPCODES = (
    "APPEND APPENDS BINGET BININT BININT1 BININT2 BINUNICODE BUILD EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME LONG1 "
    "LONG_BINGET MARK MEMOIZE NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS SHORT_BINUNICODE STACK_GLOBAL "
    "STOP TUPLE TUPLE1 TUPLE2 TUPLE3"
)
GLOBALS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata "
    "BytesStorageMetadata ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint._fsspec_filesystem": "_StorageInfo",  # until 2.2
    "torch.distributed._shard.checkpoint.metadata": "Metadata MetadataIndex TensorStorageMetadata "
    "BytesStorageMetadata ChunkStorageMetadata",  # until 1.13
    "torch.distributed._shard.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # until 2.2
    "olmo_core.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size bfloat16 bool complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 qint32 qint8 quint8 uint16 "
    "uint32 uint64 uint8",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # Python 3.13
}


def why_stock_cannot(name: str) -> str | None:
    """Returns why the stock reader of this torch cannot load what stock wrote; None if it can."""
    major, minor = torch.__version__.split(".")[:2]
    if kind_of(name) == "olmo":
        return "its metadata name a class of olmo_core, which is not installed"
    if name.endswith("py3.13") and sys.version_info < (3, 13):
        return "its metadata name pathlib._local, which Python 3.13 alone has"
    if version_of(name) < (2, 0):
        return "its metadata name the package of before 2.0; its classes import as twins, which are not the same"
    if version_of(name) < (2, 3) and kind_of(name) == "fsspec":
        return "its metadata name a class that FsspecWriter had until 2.2, and that is gone"
    if version_of(name) >= (2, 15) > (int(major), int(minor)):
        return "TensorProperties of torch 2.15 have a sixth field, strides, which those of earlier ones do not take"
    return None


def by_both_readers(names: list[str]) -> list[Any]:
    """Returns test parameters: each name with BcpReader and with the stock reader, marked where that must fail."""
    cases = []
    for name in names:
        reason = why_stock_cannot(name)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        cases.append(pytest.param(name, BcpReader, id=f"{name}-bcp"))
        cases.append(pytest.param(name, dcp.FileSystemReader, id=f"{name}-stock", marks=marks))
    return cases


def wanted_of(name: str, rank: int = 0) -> Any:
    version = version_of(name)
    state = as_saved(state_of(kind_of(name), version, rank), version)
    if version < (2, 0):
        state = {
            key: as_kept_by_113(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
    return settled(state)


def as_kept_by_113(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what is left of a tensor that was saved by torch 1.13.

    Its torch.save wrote the memory of a view, but not that the view is conjugated or negated. If the view was part of a
    larger tensor, DCP cloned it first, which applied the negation.
    """
    tensor = tensor.conj() if tensor.is_conj() else tensor
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor._neg_view() if tensor.is_neg() and is_whole else tensor


def load(state: dict[str, Any], name: str, reader: Any) -> None:
    # With flatten_sharded_tensors DCP puts objects into a dict of its own.
    flatten = kind_of(name) != "unflattened" and version_of(name) >= (2, 0)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    dcp.load(state, storage_reader=reader(GOLDEN / name), planner=planner)


@pytest.mark.parametrize(("name", "reader"), by_both_readers(LOADED_AS_ONE))
def test_it_loads(name: str, reader: Any) -> None:
    wanted = wanted_of(name)
    got = blank(wanted)
    load(got, name, reader)
    assert_equal(got, wanted)


def turned(value: torch.Tensor) -> torch.Tensor:
    """Returns zeros of the same shape, whose last stride is the largest."""
    return torch.zeros(value.shape[::-1], dtype=value.dtype).permute(list(reversed(range(value.ndim))))


@pytest.mark.parametrize(("name", "reader"), by_both_readers([name for name in PLAIN if version_of(name) >= (2, 0)]))
def test_it_loads_into_views(name: str, reader: Any) -> None:
    views = wanted_of(name)["views"]
    got = {"views": {key: turned(value) for key, value in views.items()}}
    load(got, name, reader)
    assert_equal(settled(got["views"]), views)


@pytest.mark.parametrize(("name", "reader"), by_both_readers([name for name in PLAIN if version_of(name) >= (2, 0)]))
def test_single_keys_load(name: str, reader: Any) -> None:
    """Checkpoints from before 2.0 have no ``planner_data``, without which DCP itself cannot tell keys from prefixes."""
    wanted = wanted_of(name)
    for key, value in wanted.items():
        assert_equal(_load_state_dict_from_keys({key}, storage_reader=reader(GOLDEN / name)), {key: value})
    got = _load_state_dict_from_keys({"views.sliced"}, storage_reader=reader(GOLDEN / name))
    assert_equal(got, {"views": {"sliced": wanted["views"]["sliced"]}})


def in_parts(value: Any) -> Any:
    """Returns ``value`` with this rank's local tensors in place of each distributed tensor."""
    if isinstance(value, dict):
        return {key: in_parts(item) for key, item in value.items()}
    return settled(local_tensors(value)) if isinstance(value, DTensor | ShardedTensor) else value


def load_over_ranks(name: str, reader: Any) -> None:
    version, kind = version_of(name), kind_of(name)
    state = state_of(kind, version, dist.get_rank())
    got = as_saved(laid_out(kind, blank(state)), version)
    load(got, name, reader)
    assert_equal(in_parts(got), in_parts(as_saved(laid_out(kind, state), version)))


@pytest.mark.parametrize(("name", "reader"), by_both_readers(RANKED))
def test_it_loads_over_three_ranks(name: str, reader: Any) -> None:
    run_ranks(3, load_over_ranks, name, reader)


@pytest.mark.parametrize(("name", "reader"), by_both_readers(UNCOORDINATED))
def test_uncoordinated_ranks_load_their_own(name: str, reader: Any) -> None:
    run_ranks(2, load_over_ranks, name, reader)


@pytest.mark.parametrize(("name", "reader"), by_both_readers(UNCOORDINATED))
def test_one_process_loads_of_uncoordinated_ranks_the_first(name: str, reader: Any) -> None:
    wanted = wanted_of(name)
    del wanted["rows"]  # the first rank wrote only a part of it
    got = blank(wanted)
    load(got, name, reader)
    assert_equal(got, wanted)


def described(value: Any) -> Any:
    """Returns all fields of metadata, with the names of types, because older torch has the classes in other modules."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {}
        for field in dataclasses.fields(value):
            # An instance from an older pickle lacks fields that have been added since.
            absent: Any = [] if field.default_factory is list else None
            fields[field.name] = described(getattr(value, field.name, absent))
        return type(value).__name__, fields
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list):
        return [described(item) for item in value]
    return type(value), value


def has_metadata_to_compare(name: str) -> bool:
    """Whether both read the metadata. Stock can read, but not use, those from before 2.0; we refuse compressed ones."""
    return (why_stock_cannot(name) is None or version_of(name) < (2, 0)) and kind_of(name) != "compressed"


@pytest.mark.parametrize("name", [name for name in NAMES if has_metadata_to_compare(name)])
def test_metadata_are_what_stock_reads(name: str) -> None:
    for rank in (0, 1) if name in UNCOORDINATED else (None,):
        options = {} if rank is None else {"rank": rank}
        theirs = without_strides(dcp.FileSystemReader(GOLDEN / name).read_metadata(**options))
        ours = BcpReader(GOLDEN / name).read_metadata(**options)
        assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
        assert described(ours.state_dict_metadata) == described(theirs.state_dict_metadata)
        assert described(ours.planner_data) == described(theirs.planner_data)
        assert ours.version == theirs.version
        assert ours.storage_meta is not None
        assert theirs.storage_meta is not None
        ours.storage_meta.load_id = theirs.storage_meta.load_id = None  # each load has its own
        assert described(ours.storage_meta) == described(theirs.storage_meta)
        assert places(ours.storage_data) == places(theirs.storage_data)


def places(storage_data: Any) -> dict[Any, Any]:
    """Returns the storage data by all fields of the index, because its ``==`` leaves one out. The order is lost."""
    return {(index.fqn, index.offset, index.index): described(info) for index, info in storage_data.items()}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        # Stock can load these if the package is installed. Our error names the transform that we lack.
        ("compressed", r"stream\.zstd"),
        # Stock can write these files, but has no reader for them.
        ("safetensors", "safetensors"),
    ],
)
def test_what_is_refused(kind: str, named: str) -> None:
    name = f"2.13.0-{kind}"
    errors = failures(lambda: load(blank(wanted_of(name)), name, BcpReader))
    assert set(errors) == {0}
    with pytest.raises(UnsupportedError, match=named):
        raise errors[0]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("compressed")])
def test_every_element_is_there_and_is_what_was_written(name: str) -> None:
    found = _core.inspect_folder(str(GOLDEN / name))
    assert (found["state"], found["reason"]) == ("complete", "")
    report = verify(GOLDEN / name)
    assert report.is_whole
    assert (report.bytes_checked == 0) == name.endswith("no_crc")
    assert report.unreferenced == []


@pytest.mark.parametrize("version", ["2.3.1", "2.13.0"])
@pytest.mark.parametrize(
    ("reader", "error"), [(BcpReader, UnsafeObjectError), (dcp.FileSystemReader, pickle.UnpicklingError)]
)
def test_a_subclass_of_tensor_loads_if_its_class_is_trusted(
    version: str, reader: Any, error: type[BaseException]
) -> None:
    """The rule is that of torch's ``weights_only``, with which stock reads tensors since 2.4. The other keys load."""
    name = f"{version}-subclass"
    wanted = {"tagged": wanted_of(name)["tagged"].as_subclass(torch.Tensor), "plain": wanted_of(name)["plain"]}
    errors = failures(lambda: load(blank(wanted), name, reader))
    with pytest.raises(error, match=r"interop\.stock_states\.Tagged"):
        raise errors[0]
    got = blank({"plain": wanted["plain"]})
    load(got, name, reader)
    assert_equal(got, {"plain": wanted["plain"]})
    got = blank(wanted)
    with torch.serialization.safe_globals([Tagged]):
        load(got, name, reader)
    assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("reader", "error"), [(BcpReader, UnsafeObjectError), (dcp.FileSystemReader, pickle.UnpicklingError)]
)
def test_a_tensor_that_wraps_tensors_loads_if_its_class_is_trusted(reader: Any, error: type[BaseException]) -> None:
    """It loads into a tensor of its own class, with all that it wraps."""
    name = "2.13.0-wrapper"
    wanted = state_of("wrapper", (2, 13))
    got = {"wrapped": TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3)), "plain": torch.zeros(2)}
    errors = failures(lambda: load(got, name, reader))
    with pytest.raises(error, match="TwoTensor"):
        raise errors[0]
    with torch.serialization.safe_globals([TwoTensor]):
        load(got, name, reader)
    assert_equal(got["plain"], wanted["plain"])
    assert_equal([got["wrapped"].a, got["wrapped"].b], [wanted["wrapped"].a, wanted["wrapped"].b])


class _Anything:
    """Replaces every class that a pickle names, so that the pickle can be read without it."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _Names(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add((module, name))
        return _Anything


def test_what_the_metadata_are_made_of() -> None:
    """Together these pickles have every opcode and every global that our reader of pickles must know."""
    opcodes: set[str] = set()
    found: set[tuple[str, str]] = set()
    for path in GOLDEN.glob("*/*.metadata"):
        data = path.read_bytes()
        opcodes |= {opcode.name for opcode, _, _ in pickletools.genops(data)}
        names = _Names(data)
        names.load()
        found |= names.found
    assert found == {(module, name) for module, names in GLOBALS.items() for name in names.split()}
    assert opcodes == set(OPCODES.split())


def test_their_sizes() -> None:
    sizes = {name: sum(file.stat().st_size for file in (GOLDEN / name).iterdir()) for name in NAMES}
    assert max(sizes.values()) < 60_000
    assert sum(sizes.values()) < 3 << 19
