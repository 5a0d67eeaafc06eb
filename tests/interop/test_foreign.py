# SPDX-License-Identifier: Apache-2.0
"""Tests checkpoints that stock DCP has just written: layouts, resharding, damage, and paths and code to refuse."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, without_strides
from support.ranks import failures, run_ranks
from support.sharded_states import state as sharded_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bytecheckpoint import BcpReader, BcpWriter, Config, VerifyReport, verify
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CorruptCheckpointError,
    StorageError,
    UnsafeObjectError,
    UnsupportedError,
)
from bytecheckpoint.tensors.chunks import LocalChunks


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: numbers(6, 5, 4),
    "transposed": lambda: numbers(6, 5).t(),
    "permuted": lambda: numbers(3, 4, 5, 2).permute(2, 0, 3, 1),
    "channels last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": lambda: numbers(10, 10)[2:7, 3:9],
    "with steps": lambda: numbers(10, 10)[::2, ::3],
    "expanded": lambda: numbers(1, 7).expand(5, 7),
    "overlapping": lambda: torch.as_strided(numbers(12), (5, 4), (2, 1)),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: numbers(0, 3),
    "one": lambda: numbers(1, 1, 1),
    "unit dims": lambda: numbers(4, 1, 6).transpose(0, 2),
    "conjugate": lambda: torch.complex(numbers(3, 4), -numbers(3, 4)).conj(),
    "negative": lambda: torch.complex(numbers(3, 4), numbers(3, 4)).conj().imag,
    "parameter": lambda: torch.nn.Parameter(numbers(3, 3)),
    "large": lambda: numbers(1300, 1700).t(),
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "ckpt"
    dcp.save({name: make() for name, make in LAYOUTS.items()}, storage_writer=dcp.FileSystemWriter(path))
    return path


@pytest.mark.parametrize("make_target", ["contiguous", "as saved", "float64"])
def test_layouts(layouts: Path, make_target: str) -> None:
    wanted = {name: make().detach() for name, make in LAYOUTS.items()}
    got = {}
    for name, tensor in wanted.items():
        plain = tensor.resolve_conj().resolve_neg()
        if make_target == "contiguous":
            got[name] = torch.zeros(plain.shape, dtype=plain.dtype)
        elif make_target == "as saved":
            got[name] = torch.zeros_like(plain)
        else:
            got[name] = torch.zeros(plain.shape, dtype=torch.complex128 if plain.is_complex() else torch.float64)
    dcp.load(got, storage_reader=BcpReader(layouts))
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name


def load_rows_and_columns(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, 1):
        got: dict[str, Any] = {}
        for name, make in LAYOUTS.items():
            shape = make().shape
            if len(shape) > dim and not make().is_complex():
                blank = torch.zeros(shape)
                got[name] = distribute_tensor(blank, mesh, [Shard(dim)], src_data_rank=None)
        dcp.load(got, storage_reader=BcpReader(path))
        for name, tensor in got.items():
            assert isinstance(tensor, DTensor)
            wanted = distribute_tensor(LAYOUTS[name]().detach().clone(), mesh, [Shard(dim)], src_data_rank=None)
            assert torch.equal(tensor.to_local(), wanted.to_local()), (name, dim)


def test_layouts_onto_ranks(layouts: Path) -> None:
    run_ranks(3, load_rows_and_columns, str(layouts))


def save_stock(path: str) -> None:
    dcp.save(sharded_state("saved", filled=True), storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def load_sharded(path: str, layout: str) -> None:
    got = sharded_state(layout, filled=False)
    dcp.load(got, storage_reader=BcpReader(path))
    assert_equal(got, sharded_state(layout, filled=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_resharding(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(2, save_stock, str(tmp_path / "ckpt"))
    run_ranks(num_ranks, load_sharded, str(tmp_path / "ckpt"), "moved")


def failure_of(target: dict[str, Any], path: Path, **config: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=BcpReader(path, config=Config(**config)))
    ((error, _),) = caught.value.failures.values()
    return error


def test_metadata_is_equal(layouts: Path) -> None:
    ours, theirs = BcpReader(layouts).read_metadata(), without_strides(dcp.FileSystemReader(layouts).read_metadata())
    assert ours.storage_meta is not None
    assert theirs.storage_meta is not None
    assert ours.storage_meta.load_id, "a load has an id of its own"
    theirs.storage_meta.load_id = ours.storage_meta.load_id
    assert ours == theirs
    assert pickle.loads(pickle.dumps(ours)) == theirs
    assert type(pickle.loads(pickle.dumps(BcpReader(layouts).read_metadata()))) is Metadata


def test_damaged_elements_are_seen(tmp_path: Path) -> None:
    """torch.load does not compare the archive's checksums, but the archive has them, and we do."""
    wanted = {"small": numbers(100), "large": numbers(3_000_000)}
    dcp.save(wanted, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    info = {index.fqn: place for index, place in BcpReader(tmp_path).read_metadata().storage_data.items()}
    for key, place in info.items():
        damaged = bytearray(content)
        damaged[place.offset + place.length // 2] ^= 4
        file.write_bytes(damaged)
        error = failure_of({key: torch.zeros_like(wanted[key])}, tmp_path)
        assert type(error) is CorruptCheckpointError
        assert str(file) in str(error)
        assert "set_crc32_options" in str(error)
        got = {key: torch.zeros_like(wanted[key])}
        dcp.load(got, storage_reader=BcpReader(tmp_path, config=Config(verify=False)))
        assert not torch.equal(got[key], wanted[key])
    file.write_bytes(content)
    got = {key: torch.zeros_like(value) for key, value in wanted.items()}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert all(torch.equal(got[key], value) for key, value in wanted.items())


def test_cut_and_missing_files(tmp_path: Path) -> None:
    wanted = {"a": numbers(50_000), "step": 3}
    dcp.save(wanted, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        error = failure_of({"a": numbers(50_000), "step": 0}, tmp_path)
        assert isinstance(error, CorruptCheckpointError | UnsupportedError), error
        assert str(file) in str(error)
    file.unlink()
    error = failure_of({"a": numbers(50_000), "step": 0}, tmp_path)
    assert type(error) in (CorruptCheckpointError, StorageError)
    assert str(file) in str(error)


def test_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": numbers(1000)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    finally:
        torch.serialization.set_crc32_options(True)
    got = {"a": torch.zeros(1000)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["a"], numbers(1000))


def rewrite(path: Path, change: Callable[[Metadata], None]) -> None:
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def point_to(name: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(place, relative_path=name)

    return change


@pytest.mark.parametrize("name", ["../outside.distcp", "/{tmp}/outside.distcp", "below/../../outside.distcp", ""])
def test_names_that_lead_outside_are_not_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ckpt"
    dcp.save({"a": numbers(10)}, storage_writer=dcp.FileSystemWriter(path))
    (file,) = path.glob("*.distcp")
    (path / "below").mkdir()
    file.rename(tmp_path / "outside.distcp")
    rewrite(path, point_to(name.format(tmp=str(tmp_path).strip("/"))))
    error = failure_of({"a": torch.zeros(10)}, path)
    assert type(error) is CorruptCheckpointError
    assert "'a'" in str(error)
    assert str(path / ".metadata") in str(error)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    """The code is in the metadata, in an object, or in the record of a tensor."""
    path, mark = tmp_path / "ckpt", tmp_path / "it ran"
    dcp.save({"a": numbers(10), "step": 3}, storage_writer=dcp.FileSystemWriter(path))
    original = (path / ".metadata").read_bytes()

    def poison(metadata: Metadata) -> None:
        metadata.planner_data["x"] = Harmful(mark)

    metadata = pickle.loads(original)
    poison(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of({"a": torch.zeros(10)}, path)
    assert type(error) is UnsupportedError
    assert "mkdir" in str(error)
    assert not mark.exists()

    (path / ".metadata").write_bytes(original)
    (file,) = path.glob("*.distcp")
    torch.save(Harmful(mark), file)
    size = file.stat().st_size

    def one_record(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(place, offset=0, length=size)

    rewrite(path, one_record)
    for target in ({"a": torch.zeros(10)}, {"step": 0}):
        error = failure_of(target, path)  # type: ignore[arg-type]
        assert type(error) is UnsafeObjectError
        assert f"'{next(iter(target))}'" in str(error)
        assert not mark.exists()


def plans_of(state: dict[str, Any]) -> list[SavePlan]:
    """Returns plans as Megatron-Core puts them into ``Metadata.all_local_plans``."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return [planner.create_local_plan(), SavePlan([], storage_data={"prefix": "__1_"}, planner_data={"a": ("a",)})]


def test_metadata_with_plans_of_ranks(tmp_path: Path) -> None:
    """Megatron-Core keeps them there for its next save. They are read as a description, and nobody looks at them."""
    path, state = tmp_path / "ckpt", {"a": numbers(10), "step": 3, "nested": {"w": numbers(2, 3)}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.all_local_plans = plans_of(state)
    for protocol in (2, 4, 5):
        (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        got = {"a": torch.zeros(10), "step": 0, "nested": {"w": torch.zeros(2, 3)}}
        dcp.load(got, storage_reader=BcpReader(path))
        assert_equal(got, state)
        assert verify(path).problems == []
    metadata.all_local_plans[0].items.append(DefaultSavePlanner())  # no class of plans
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    error = failure_of({"a": torch.zeros(10)}, path)
    assert type(error) is UnsupportedError
    assert re.search(r"STACK_GLOBAL \(0x93\) at byte \d+: global '.*DefaultSavePlanner' is not allowed", str(error))


def test_records_that_are_no_archives_are_refused(tmp_path: Path) -> None:
    dcp.save({"a": numbers(10)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(b"\x08\0\0\0\0\0\0\0{}      " + bytes(file.stat().st_size))
    error = failure_of({"a": torch.zeros(10)}, tmp_path)
    assert type(error) is UnsupportedError
    assert str(file) in str(error)


def test_compressed_archives_are_left_to_torch(tmp_path: Path) -> None:
    """We do not know the layout of a zip with a compression method, so torch.load decides."""
    dcp.save({"a": numbers(10)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    packed = tmp_path / "packed"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    size = packed.stat().st_size
    packed.rename(file)

    def one_record(metadata: Metadata) -> None:
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(place, offset=0, length=size)

    rewrite(tmp_path, one_record)
    got = {"a": torch.zeros(10)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["a"], numbers(10))


def verified(path: Path) -> VerifyReport:
    """Returns the report of ``verify``, which must count each byte of a record as checked or as without a checksum."""
    report = verify(path)
    records = dcp.FileSystemReader(path).read_metadata().storage_data.values()
    assert report.num_records == len(records)
    assert report.bytes_checked + report.bytes_unchecked == sum(storage.length for storage in records)
    return report


def test_verify_compares_the_checksums_of_records(layouts: Path) -> None:
    report = verified(layouts)
    assert report.is_whole
    assert report.bytes_checked > 0
    assert report.unreferenced == []


def test_verify_finds_every_changed_byte_of_a_tensor_and_of_an_object(tmp_path: Path) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.arange(3), "step": {"lr": 0.125, "name": "x" * 100}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    assert verified(tmp_path).is_whole
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    for fqn, needle in (("a", torch.arange(990.0, 1000.0).numpy().tobytes()), ("step.name", b"x" * 50)):
        at = content.index(needle)
        file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        (problem,) = verify(tmp_path).problems
        assert (problem.file, problem.section, problem.fqns) == (file.name, "records", [fqn])
        assert problem.offset is not None
        assert problem.num_bytes is not None
        assert problem.offset <= at < problem.offset + problem.num_bytes
    file.write_bytes(content[:-1])
    assert {problem.section for problem in verify(tmp_path).problems} == {"file"}
    file.unlink()
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.section) == (file.name, "file")


def test_verify_says_how_many_bytes_have_no_checksum(tmp_path: Path) -> None:
    wanted = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": numbers(1000)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    finally:
        torch.serialization.set_crc32_options(wanted)
    report = verified(tmp_path)
    assert report.is_whole
    assert report.bytes_checked == 0
    assert report.bytes_unchecked > 4000


def test_verify_names_what_a_stock_save_of_one_rank_lacks(tmp_path: Path) -> None:
    half = LocalChunks((8,), [(0,)], [torch.arange(4.0)], torch.float32)
    dcp.save({"w": half}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (problem,) = verified(tmp_path).problems
    assert (problem.file, problem.section, problem.fqns) == (".metadata", "metadata", ["w"])
    assert problem.message == "'w': rows 4 to 7 of 8 are in no chunk"


def test_saving_over_a_stock_checkpoint_and_back(tmp_path: Path) -> None:
    for generation, writer in enumerate((dcp.FileSystemWriter, BcpWriter, dcp.FileSystemWriter, BcpWriter)):
        dcp.save({"a": numbers(100) + generation}, storage_writer=writer(tmp_path))  # type: ignore[operator]
        for reader in (BcpReader, dcp.FileSystemReader):
            got = {"a": torch.zeros(100)}
            dcp.load(got, storage_reader=reader(tmp_path))
            assert torch.equal(got["a"], numbers(100) + generation)
    assert len(list(tmp_path.glob("*.distcp"))) == 2, "stock's file stays, ours of the earlier save is swept"


def test_rewritten_metadata(tmp_path: Path) -> None:
    """A load refuses our checkpoint with rewritten metadata unless the config accepts it; it then checks blocks too."""
    wanted = {"a": numbers(1000), "b": torch.quantize_per_tensor(numbers(4), 0.5, 0, torch.qint8), "step": 3}
    dcp.save(wanted, storage_writer=BcpWriter(tmp_path))
    rewrite(tmp_path, lambda metadata: None)
    target: dict[str, Any] = {
        "a": torch.zeros(1000),
        "b": torch.quantize_per_tensor(torch.zeros(4), 0.5, 0, torch.qint8),
        "step": 0,
    }
    assert type(failure_of(target, tmp_path)) is CorruptCheckpointError
    dcp.load(target, storage_reader=BcpReader(tmp_path, config=Config(accept_rewritten_metadata=True)))
    assert torch.equal(target["a"], wanted["a"])  # type: ignore[arg-type]
    assert torch.equal(target["b"].int_repr(), wanted["b"].int_repr())  # type: ignore[union-attr]
    assert target["step"] == 3
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    error = failure_of(target, tmp_path, accept_rewritten_metadata=True)
    assert type(error) is CorruptCheckpointError
    assert "block has CRC" in str(error)


def replaced_meanwhile(path: str) -> None:
    """Lets one rank read the metadata of a stock checkpoint, and the other those of ours that replaced it."""
    if dist.get_rank() == 0:
        dcp.save({"a": numbers(8)}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)

    class Late(BcpReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if dist.get_rank() == 1:
                dist.barrier()
                return super().read_metadata(*args, **kwargs)
            metadata = super().read_metadata(*args, **kwargs)
            dcp.save({"a": numbers(8) + 1}, storage_writer=BcpWriter(path), no_dist=True)
            dist.barrier()
            return metadata

    dist.barrier()
    found = failures(lambda: dcp.load({"a": torch.zeros(8)}, storage_reader=Late(path)))
    assert {type(error) for error in found.values()} == {CheckpointChangedError}


def test_replaced_between_ranks(tmp_path: Path) -> None:
    run_ranks(2, replaced_meanwhile, str(tmp_path / "ckpt"))
