# SPDX-License-Identifier: Apache-2.0
"""There is no lock-in at an object store either: torch's and Amazon's classes read our checkpoints, and we read theirs.

The store is a real server that speaks S3. Other libraries run in processes of their own, because they leave threads
behind.

Not run here: OLMo-core, which does not support this torch. Its ``RemoteFileSystemWriter`` writes the same names and
bytes to a URL as to a directory: each ``__{rank}_{n}.distcp`` and ``.metadata`` is a temporary file that it renames or
uploads. So the golden checkpoint that it wrote into a directory is uploaded file by file, and loads from there.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import sharded_states
from support.equality import assert_equal
from support.goldens import GOLDEN
from support.ranks import run_ranks
from support.seaweedfs import SeaweedFS
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    VerifyReport,
    load_state_dict,
    verify,
)
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, StorageError
from bytecheckpoint.storage.object_store.stores import use_store

# Kinds whose other keys load only on several ranks, into targets of their own, or if a class is trusted.
KEYS = {"no_collectives": {"whole", "mine"}, "v2": {"whole", "step"}, "subclass": {"plain"}, "wrapper": {"plain"}}
# Kinds that load from no place, and such that need targets of their own: these fail alike.
REFUSED = ("compressed", "safetensors", "quantized")

_numbers = itertools.count()


def kind_of(folder: Path) -> str:
    return folder.name.removesuffix("-py3.13").split("-")[-1]


def goldens() -> list[Path]:
    """Returns ours, and of each kind of stock's those of the oldest and the newest torch."""

    def version(folder: Path) -> tuple[int, ...]:
        return tuple(map(int, folder.name.split("-")[0].split(".")))

    by_kind: dict[str, list[Path]] = {}
    for folder in sorted((GOLDEN / "stock").iterdir(), key=version):
        by_kind.setdefault(kind_of(folder), []).append(folder)
    ends = {folder for folders in by_kind.values() for folder in (folders[0], folders[-1])}
    return [GOLDEN / "v1", GOLDEN / "v2", *sorted(ends)]


@pytest.fixture
def url() -> str:
    """Returns a folder whose name has characters that libraries escape in their own ways."""
    return f"s3://checkpoints/run {next(_numbers)}+a=b~\u00e4/step-1"


def state(layout: str, *, filled: bool) -> dict[str, Any]:
    """Returns tensors that are sharded and not, one of them larger than a part of an upload, dicts and objects."""
    large = sharded_states.full("large", (1500, 2000)) if filled else torch.zeros(1500, 2000)
    return {
        **sharded_states.state(layout, filled=filled),
        "nested": {"deep": {"er": [{"large": large}, 5 if filled else 0]}, "text": "\u00e4" if filled else ""},
    }


def assert_loads(reader: Any, layout: str, planner: Any = None) -> None:
    got = state(layout, filled=False)
    dcp.load(got, storage_reader=reader, planner=planner)
    assert_equal(got, state(layout, filled=True))


# Classes of others. Each function makes one for a URL.


def access(options: dict[str, Any]) -> dict[str, Any]:
    """Returns what s3fs calls the options."""
    names = {"key": "access_key_id", "secret": "secret_access_key", "endpoint_url": "endpoint"}
    return {
        **{name: options[ours] for name, ours in names.items()},
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }


def of_amazon(kind: str, url: str, options: dict[str, Any], **more: Any) -> Any:
    """Returns an S3StorageReader or S3StorageWriter. They take the endpoint from the variables alone."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector import dcp as amazon

    os.environ.update(
        AWS_ACCESS_KEY_ID=options["access_key_id"],
        AWS_SECRET_ACCESS_KEY=options["secret_access_key"],
        AWS_ENDPOINT_URL=options["endpoint"],
    )
    config = S3ClientConfig(force_path_style=True)
    return getattr(amazon, kind)(options["region"], f"{url}/", s3client_config=config, **more)


def reader_of(kind: str, url: str, options: dict[str, Any]) -> Any:
    if kind == "fsspec":
        return dcp.FsspecReader(url, **access(options))
    from s3torchconnector.s3reader import S3ReaderConstructor

    constructors = {
        "amazon": None,
        "amazon, sequential": S3ReaderConstructor.sequential(),
        "amazon, by ranges": S3ReaderConstructor.range_based(),
    }
    return of_amazon("S3StorageReader", url, options, reader_constructor=constructors[kind])


def writer_of(kind: str, url: str, options: dict[str, Any]) -> Any:
    if kind.startswith("fsspec"):
        return dcp.FsspecWriter(url, single_file_per_rank=kind != "fsspec, a file for each tensor", **access(options))
    from s3torchconnector.dcp import s3_prefix_strategy as strategies

    prefixes = {
        "amazon": lambda: None,
        "amazon, binary": lambda: strategies.BinaryPrefixStrategy(epoch_num=3),
        "amazon, hex": lambda: strategies.HexPrefixStrategy(min_prefix_length=1),
        "amazon, round robin": lambda: strategies.RoundRobinPrefixStrategy(["a", "b c/d"], epoch_num=1),
    }
    return of_amazon("S3StorageWriter", url, options, prefix_strategy=prefixes[kind](), thread_count=2)


def need(kind: str) -> None:
    package = "s3fs" if kind.startswith("fsspec") else "s3torchconnector.dcp"
    pytest.importorskip(package, reason=f"{package} is not installed: ITS CHECKPOINTS ARE NOT TESTED")


# They read ours.


def save_ours(url: str, options: dict[str, Any]) -> None:
    writer = BcpWriter(url, config=Config(storage_options=options))
    dcp.save(state("saved", filled=True), storage_writer=writer, planner=BcpSavePlanner())


@pytest.fixture(scope="module")
def ours(server: SeaweedFS) -> str:
    """Returns a URL where two ranks have saved with our writer."""
    url = "s3://checkpoints/of ours+a=b~\u00e4/step-1"
    run_ranks(2, save_ours, url, server.options)
    return url


def load_by(kind: str, url: str, options: dict[str, Any]) -> None:
    for layout in ("moved", "plain"):
        assert_loads(reader_of(kind, url, options), layout)


@pytest.mark.parametrize("kind", ["fsspec", "amazon", "amazon, sequential", "amazon, by ranges"])
def test_they_read_ours(server: SeaweedFS, ours: str, kind: str) -> None:
    need(kind)
    run_ranks(2, load_by, kind, ours, server.options)


# We read theirs.


def save_by(kind: str, url: str, options: dict[str, Any]) -> None:
    dcp.save(state("saved", filled=True), storage_writer=writer_of(kind, url, options))


def save_by_them_and_load(kind: str, url: str, options: dict[str, Any]) -> None:
    save_by(kind, url, options)
    for layout, planner in (("moved", None), ("plain", BcpLoadPlanner())):
        assert_loads(BcpReader(url, config=Config(storage_options=options)), layout, planner)


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("fsspec", ["__0_0.distcp", "__1_0.distcp"]),
        ("fsspec, a file for each tensor", []),
        ("amazon", ["__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"]),
        ("amazon, binary", ["0000000000/epoch_3/__0_0.distcp", "1000000000/epoch_3/__1_0.distcp"]),
        ("amazon, hex", ["0/__0_0.distcp", "1/__1_0.distcp"]),
        ("amazon, round robin", ["a/epoch_1/__0_0.distcp", "b c/d/epoch_1/__1_0.distcp"]),
    ],
)
def test_we_read_theirs(server: SeaweedFS, url: str, kind: str, files: list[str]) -> None:
    need(kind)
    run_ranks(2, save_by_them_and_load, kind, url, server.options)
    config = Config(storage_options=server.options)
    client = use_store(url, config)
    assert all(client.head(name) for name in [".metadata", *files])
    report = verify(url, config=config)
    report.raise_if_damaged()
    assert report.bytes_checked > 100 * report.bytes_unchecked
    assert (report.unreferenced, report.notes) == ([], [])
    # A flipped byte is found there, too.
    names = files or [name for name in client.names() if name != ".metadata"]
    name = max(names, key=lambda name: client.open(name)[0])
    damaged = bytearray(client.get(name))
    damaged[len(damaged) // 2] ^= 1
    client.put_if(name, bytes(damaged), client.head(name))
    assert not verify(url, config=config).is_whole


@pytest.mark.parametrize(
    ("prefix", "error", "sentence"),
    [
        (
            "../elsewhere",
            CorruptCheckpointError,
            r"file name '\.\./elsewhere/__0_0\.distcp' leads out of the checkpoint",
        ),
        ("a/", StorageError, r"the key '.*/a//__0_0\.distcp' has a part that is empty, '\.' or '\.\.', which obstore"),
    ],
)
def test_prefixes_that_we_refuse(
    server: SeaweedFS, url: str, tmp_path: Path, prefix: str, error: type[CheckpointError], sentence: str
) -> None:
    """RoundRobinPrefixStrategy([prefix]) writes such files to S3. This server refuses the one and renames the other."""
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.storage_data is not None
    for info in metadata.storage_data.values():
        info.relative_path = f"{prefix}/{info.relative_path}"
    config = Config(storage_options=server.options)
    use_store(url, config).put_if(".metadata", pickle.dumps(metadata), None)
    with pytest.raises(error, match=sentence) as caught:
        load_state_dict(url, {"w": torch.zeros(3)}, config=config)
    assert "\n" not in str(caught.value)
    with pytest.raises(error, match=sentence):
        verify(url, config=config).raise_if_damaged()


# Both write into one folder.


def save_over_one_another(kind: str, url: str, options: dict[str, Any]) -> None:
    config = Config(storage_options=options)
    writers = (writer_of(kind, url, options), BcpWriter(url, config=config), writer_of(kind, url, options))
    for step, writer in enumerate(writers):
        dcp.save({"w": torch.full((1000,), step), "step": step}, storage_writer=writer)
        for reader in (BcpReader(url, config=config), reader_of(kind, url, options)):
            got = {"w": torch.full((1000,), -1), "step": -1}
            dcp.load(got, storage_reader=reader)
            assert (got["w"] == step).all()
            assert got["step"] == step


@pytest.mark.parametrize("kind", ["fsspec", "amazon"])
def test_each_replaces_the_checkpoint_of_the_other(server: SeaweedFS, url: str, kind: str) -> None:
    """Data files of the other one stay: they do not have names of which a save knows that it may remove them."""
    need(kind)
    run_ranks(1, save_over_one_another, kind, url, server.options)
    names = use_store(url, Config(storage_options=server.options)).names()
    assert {".metadata", "__0_0.distcp"} < set(names)
    assert sum(name.count(".") == 2 for name in names) == 1


# Golden checkpoints.


def loaded(reader: BcpReader, keys: set[str] | None) -> Any:
    """Returns keys of a checkpoint, all if ``keys`` is None; or the text of the error, without its place."""
    try:
        return _load_state_dict_from_keys(keys, storage_reader=reader)
    except CheckpointException as error:
        (cause,) = (wrapped[0] for wrapped in error.failures.values())
        return str(cause).replace(str(reader.path), "PLACE")


def report_of(place: str | Path, config: Config) -> VerifyReport:
    report = verify(place, config=config)
    assert report.is_whole
    return dataclasses.replace(report, path="")


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("folder", goldens(), ids=lambda folder: str(folder.relative_to(GOLDEN)))
def test_goldens_load_from_there_as_from_a_directory(server: SeaweedFS, folder: Path) -> None:
    """They are of stock DCP from torch 1.13 on, of OLMo-core, and ours. tests/interop knows the values of all."""
    url, config = f"s3://golden/{folder.relative_to(GOLDEN)}", Config(storage_options=server.options)
    client = use_store(url, config)
    for path in folder.iterdir():
        client.put_if(path.name, path.read_bytes(), None)
    kind = kind_of(folder)
    here = loaded(BcpReader(folder), KEYS.get(kind))
    assert isinstance(here, str) == (kind in REFUSED), here
    assert_equal(loaded(BcpReader(url, config=config), KEYS.get(kind)), here)
    if kind != "compressed":
        assert report_of(url, config) == report_of(folder, Config())
