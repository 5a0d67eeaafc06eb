# SPDX-License-Identifier: Apache-2.0
"""Makes the inputs that fuzzing started with: ``PYTHONPATH=tests python3 tests/fuzz/make_seeds.py build/fuzz/corpus``.

They come from ``tests/cpp/data``, the golden checkpoints, and this file. The committed corpora are the part of these
seeds and of the fuzzer's finds that adds coverage.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import hashlib
import io
import pathlib
import pickle
import pickletools
import struct
import sys
import types
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.goldens import GOLDEN as GOLDENS

TESTS = Path(__file__).parents[1]
BLOCK = 256 << 10

VALUES: list[Any] = [
    None,
    {"a": [1, -1, 255, 65536, 2**31, -(2**63), 2**63 - 1], "b": (True, False, None), "c": {}},
    [1.5, float("inf"), -0.0, "text", "\u00e9\u20ac\U0001f600", b"", b"bytes\xff", (), (1,), (1, 2), (1, 2, 3)],
    {("layer", 4): {"nested": [[], [[]], {"x": ()}]}, 7: b"z" * 300, "long": "y" * 300},
    [[i, str(i)] for i in range(40)],
    2**70,
    {1, 2},
    bytearray(b"abc"),
]


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def varints(*values: int) -> bytes:
    return b"".join(map(varint, values))


def signed(content: bytes, position: int) -> bytes:
    out = bytearray(content)
    struct.pack_into("<I", out, position, 0)
    struct.pack_into("<I", out, position, zlib.crc32(out))
    return bytes(out)


def data_file(records: bytes) -> bytes:
    file_id = bytes(range(16))
    header = b"BCPDATA\1" + struct.pack("<II", 1, 0) + file_id + struct.pack("<II", 3, 1)
    body = signed(header.ljust(4096, b"\0"), 64) + records
    table = b"".join(struct.pack("<I", zlib.crc32(body[at : at + BLOCK])) for at in range(0, len(body), BLOCK))
    trailer = file_id + struct.pack("<IIqIIqII", 3, 1, len(body), BLOCK, zlib.crc32(table), len(table) // 4, 0, 0)
    trailer += struct.pack("<QII", 0, 1, 80) + b"BCPTAIL\1"
    return body + table + signed(trailer, 48)


def name_and_path(name: bytes, path: bytes = b"", shared: int = 0) -> bytes:
    return varints(shared, len(name)) + name + varints(0, len(path)) + path


def inventories() -> Iterator[tuple[bytes, int]]:
    """Yields inventories, each with the number of its boxes."""
    follows, shard, tensor, split = 1 << 7, 2, 1, 1 << 4
    one = varints(1, 1, 1, 0, 1)  # version; one set of one run: only rank 0
    plain = (
        bytes([tensor | follows | split])
        + name_and_path(b"layer.weight", b"path")
        + bytes([1, 2])
        + varints(64, 300, 0)
    )
    object_ = bytes([follows]) + name_and_path(b"extra") + varints(0)
    boxes = varints(2, 0, 0, 4, 8, 0, 4, 0, 4, 8, 0)
    sharded = bytes([shard | follows]) + name_and_path(b"bias", shared=6) + bytes([2, 2]) + varints(8, 8) + boxes
    yield one + varints(0), 0
    yield one + varints(1) + plain, 1
    yield one + varints(3) + plain + sharded + object_, 4
    yield one + varints(1) + bytes([tensor | 5 << 2]) + varints(0, 3) + name_and_path(b"s") + bytes([3, 0, 0]), 1
    many = varints(1, 3, 1, 0, 8, 1, 1, 0, 4, 2, 2, 1, 2, 2, 0, 1)
    yield (
        many
        + varints(1)
        + bytes([shard | follows])
        + name_and_path(b"w")
        + bytes([1, 1, 8])
        + varints(2, 0, 4, 1, 4, 4, 2),
        2,
    )


def pickles() -> Iterator[bytes]:
    for value in VALUES:
        for protocol in range(6):
            yield pickle.dumps(value, protocol)
        yield pickletools.optimize(pickle.dumps(value, 4))
    yield b"\x80\x02cm\nC\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    yield b"\x80\x04\x8c\x01m\x8c\x01f\x93K\x02\x85R\x94h\x00\x86."
    yield b"\x80\x02(X\x07\x00\x00\x00storagecm\nS\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ."
    yield b"\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00\xc3\xbfX\x06\x00\x00\x00latin1\x86R."


STANDARD: list[Any] = [
    io.BytesIO(b"abc"),
    [bytearray(b"a\xff"), {1, "a"}, frozenset([2]), 1j, range(1, 9, 2), slice(1, None, [2])],
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=1), "x"), fold=1),
    [datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4), datetime.timedelta(-1, 2, 3)],
    [decimal.Decimal("1.50"), fractions.Fraction(1, 3), uuid.UUID(int=2**127), pathlib.PurePosixPath("/a/b")],
    [collections.OrderedDict(a=[1]), collections.defaultdict(list, a=[1]), collections.Counter("aab")],
    [collections.deque([1, 2], 2), types.SimpleNamespace(a={"b": 2**100})],
    {(1, frozenset([decimal.Decimal(2)])): {-(2**2000)}},
]
# Arrays as numpy 2 pickles them with protocols 2 and 5.
ARRAYS = [
    b"\x80\x02cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85c_codecs\nencode\nX\1\0\0\0bX\6\0\0\0latin1"
    b"\x86R\x87R(K\1K\2\x85cnumpy\ndtype\nX\2\0\0\0i1\x89\x88\x87R(K\3X\1\0\0\0|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb\x89"
    b"c_codecs\nencode\nX\2\0\0\0abX\6\0\0\0latin1\x86Rtb.",
    b"\x80\x05cnumpy._core.numeric\n_frombuffer\n(\x96\2\0\0\0\0\0\0\0abcnumpy\ndtype\nX\2\0\0\0u1\x89\x88\x87R(K\3X\1\0\0\0|"
    b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tbK\2\x85X\1\0\0\0CtR.",
    b"\x80\x02ctorch\nSize\nK\1\x85\x85Rctorch\ndevice\nX\3\0\0\0cpu\x85Rctorch\nfloat32\n\x87.",
]


def standard() -> Iterator[bytes]:
    for value in STANDARD:
        for protocol in (2, 4, 5):
            yield pickle.dumps(value, protocol)
    yield from ARRAYS


def archives() -> Iterator[bytes]:
    for file in sorted((TESTS / "cpp" / "data").glob("*.pt")):
        if file.stat().st_size <= 8192:
            yield file.read_bytes()


def foreign() -> Iterator[bytes]:
    for file in [
        *(TESTS / "cpp" / "data").glob("*.metadata"),
        *(GOLDENS / "stock").rglob("*.metadata"),
        *(GOLDENS / "reference").rglob("*.metadata"),
    ]:
        if file.stat().st_size <= 8192:
            yield file.read_bytes()


def rare_foreign() -> Iterator[bytes]:
    """Yields what no golden checkpoint has: Windows paths, sizes that are not numbers, states of another type."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def instance(name: str, state: bytes) -> bytes:
        return f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode() + b")\x81" + state + b"b"

    def metadata(*attributes: bytes) -> bytes:
        entries = (text("state_dict_metadata") + b"}", *attributes)
        return b"\x80\x02" + instance("Metadata", b"}(" + b"".join(entries) + b"u") + b"."

    for kind, parts in [
        ("WindowsPath", ("C:\\", "a", "D:\\b", "")),
        ("PosixPath", ("a", "", "/b", "c")),
        ("PosixPath", ()),
    ]:
        path = f"cpathlib\n{kind}\n".encode() + b"(" + b"".join(map(text, parts)) + b"tR"
        yield metadata(text("storage_meta") + instance("StorageMeta", b"}" + text("checkpoint_id") + path + b"s"))
    yield metadata(text("storage_meta") + instance("StorageMeta", b"]"))
    yield metadata(text("storage_meta") + instance("StorageMeta", b"}K\1K\1s"))
    yield metadata(text("version") + b"K\1")
    tensor = b"}(" + text("properties") + b"N" + text("size") + b"](" + b"K\1" * 300 + b"eu"
    yield metadata(text("state_dict_metadata") + b"}" + text("a") + instance("TensorStorageMetadata", tensor) + b"s")


def byte_checkpoint() -> Iterator[bytes]:
    """Yields metadata of ByteCheckpoint 0.0.x of one tensor or two: with a header, an odd one, and none."""
    dcp = "torch.distributed.checkpoint"

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def short(value: bytes) -> bytes:
        return b"C" + bytes([len(value)]) + value

    def ints(*values: int) -> bytes:
        return b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"

    def instance(module: str, name: str, **attributes: bytes) -> bytes:
        state = b"".join(text(key) + value for key, value in attributes.items())
        return f"c{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"

    def of_dict(*pairs: bytes) -> bytes:
        return b"}(" + b"".join(pairs) + b"u"

    def size(*values: int) -> bytes:
        return b"ctorch\nSize\n(" + ints(*values) + b"tR"

    def tensor(*boxes: tuple[int, ...]) -> bytes:
        chunks = b"".join(
            instance(f"{dcp}.metadata", "ChunkStorageMetadata", offsets=size(first, 0), sizes=size(rows, 2))
            for first, rows in boxes
        )
        layout = b"ctorch.serialization\n_get_layout\n(" + text("torch.strided") + b"tR"
        memory_format = f"c{dcp}.metadata\n_MEM_FORMAT_ENCODING\n(K\0tR".encode()
        values = b"(ctorch\nfloat32\n" + layout + b"\x89" + memory_format + b"\x89t"
        properties = f"c{dcp}.metadata\nTensorProperties\n".encode() + b")\x81" + values + b"b"
        shape = size(sum(rows for _, rows in boxes), 2)
        chunks = b"](" + chunks + b"e"
        return instance(f"{dcp}.metadata", "TensorStorageMetadata", properties=properties, size=shape, chunks=chunks)

    def index(fqn: str, first: int | None = None) -> bytes:
        offset = b"N" if first is None else size(first, 0)
        return instance(f"{dcp}.metadata", "MetadataIndex", fqn=text(fqn), offset=offset, index=b"N")

    def info(offset: int, length: int) -> bytes:
        return instance(
            f"{dcp}.filesystem",
            "_StorageInfo",
            relative_path=text("__0_0.distcp"),
            offset=b"K" + bytes([offset]),
            length=b"K" + bytes([length]),
        )

    def header(first: int = 0, sizes: bytes = ints(2, 2), strides: bytes = ints(2, 1), kind: str = "v2") -> bytes:
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
        hooks = b"\x89ccollections\nOrderedDict\n)R"
        function = f"ctorch._utils\n_rebuild_tensor_{kind}\n(".encode()
        return b"\x80\x02" + function + storage + b"K" + bytes([first]) + sizes + strides + hooks + b"tR."

    def metadata(items: bytes, places: bytes, headers: bytes) -> bytes:
        of = instance(
            "bytecheckpoint.checkpointer.meta_type",
            "Metadata",
            state_dict_metadata=items,
            planner_data=of_dict(text("a"), b"(" + text("a") + b"t"),
            storage_data=places,
            all_tensor_metadata=headers,
        )
        return b"\x80\x05" + of + b"."

    item, place = of_dict(text("a"), tensor((0, 2))), of_dict(index("a", 0), info(0, 16))
    for kept in [
        header(),
        header(strides=ints(1, 2)),
        header(first=1),
        header(sizes=ints(4), strides=ints(1)),
        header(kind="v1"),
        header()[:-9],
    ]:
        yield metadata(item, place, of_dict(index("a", 0), short(kept)))
    yield metadata(item, place, of_dict(index("a"), short(header())))
    yield metadata(item, place, of_dict(index("a", 0), b"N"))
    yield metadata(item, place, b"}")
    yield metadata(item, place, b"]")
    no_info = instance(f"{dcp}.metadata", "BytesStorageMetadata")
    yield metadata(of_dict(text("o"), no_info), of_dict(index("o"), info(0, 5)), of_dict(index("o"), b"N"))
    two = of_dict(index("a", 0), info(0, 16), index("a", 2), info(16, 16))
    both = of_dict(index("a", 0), short(header()), index("a", 2), short(header(strides=ints(1, 2))))
    yield metadata(of_dict(text("a"), tensor((0, 2), (2, 2))), two, both)


def ours() -> Iterator[bytes]:
    for file in (GOLDENS / "v1").rglob("*.metadata"):
        yield file.read_bytes()


def manifests() -> Iterator[bytes]:
    for content in ours():
        pickle_bytes, manifest_bytes = struct.unpack_from("<qq", content, len(content) - 112)
        yield content[pickle_bytes : pickle_bytes + manifest_bytes]


def without_pickle(content: bytes) -> bytes:
    """Drops the pickle, three quarters of the bytes, which the manifest's reader ignores."""
    trailer = bytearray(content[-128:])
    (pickle_bytes,) = struct.unpack_from("<q", trailer, 16)
    struct.pack_into("<q", trailer, 16, 0)
    struct.pack_into("<I", trailer, 44, 0)
    return content[pickle_bytes:-128] + signed(bytes(trailer), 56)


def write_results() -> Iterator[bytes]:
    file = struct.pack("<II16sqI", 3, 1, bytes(range(16)), 1 << 20, 77)
    record = struct.pack("<I", 3) + b"fqn" + struct.pack("<B4qBBI4q", 2, 0, 0, 4, 5, 1, 1, 0, 4096, 1000, 4672, 80)
    yield struct.pack("<II", 0, 0)
    yield struct.pack("<I", 1) + file + struct.pack("<I", 2) + record + record.replace(b"fqn", b"two")


def safetensors() -> Iterator[bytes]:
    """Yields files and indices."""

    def file(header: bytes, data: bytes = b"") -> bytes:
        return struct.pack("<Q", len(header)) + header + data

    two = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
    two += b'"b":{"dtype":"%s","shape":[4],"data_offsets":[8,12]}}  '
    yield file(b"{}")
    yield file(b'{"__metadata__":{"format":"pt","x":"\\u00e9\\ud83d\\ude00\\n"}}')
    for dtype in (b"U8", b"BOOL", b"F8_E4M3", b"F6_E2M3", b"C64"):
        yield file(two % dtype, bytes(12))
    pairs = b'{"q":{"shape":[3,4],"data_offsets":[0,6],"dtype":"F4"},'
    yield file(pairs + b'"z":{"dtype":"I64","shape":[0],"data_offsets":[6,6]}}', bytes(6))
    metadata = b'{"metadata":{"total_size":12.5e3,"x":[1,{},null,true]},'
    yield metadata + b'"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}'
    yield b'{"weight_map":{"a":"../x"}}'
    yield b'{"weight_map":{"a":"x","a":"y"}, "y": -0.5}'


def orbax() -> Iterator[bytes]:
    """Yields what describes arrays of zarr and trees of Orbax, and indices of files."""
    yield (
        b'{"chunks":[4,3],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"<f4",'
        b'"fill_value":null,"filters":null,"order":"C","shape":[8,6],"zarr_format":2}'
    )
    inner = b'[{"configuration":{"endian":"little"},"name":"bytes"},{"configuration":{"level":3},"name":"zstd"}]'
    index = b'[{"configuration":{"endian":"little"},"name":"bytes"},{"name":"crc32c"}]'
    sharded = b'[{"configuration":{"chunk_shape":[2,3],"codecs":%s,"index_codecs":%s},"name":"sharding_indexed"}]'
    for codecs in (inner, sharded % (inner, index)):
        yield (
            b'{"chunk_grid":{"configuration":{"chunk_shape":[4,3]},"name":"regular"},"chunk_key_encoding":'
            b'{"name":"default"},"codecs":%s,"data_type":"bfloat16","fill_value":0.0,"node_type":"array",'
            b'"shape":[8,6],"zarr_format":3}'
        ) % codecs
    value = b'{"key_metadata":[{"key":"a","key_type":2},{"key":"0","key_type":1}],"value_metadata":{"value_type":"%s"}}'
    skipped = b'{"key_metadata":[{"key":"b"}],"value_metadata":{"value_type":"Dict","skip_deserialize":true}}'
    yield b'{"tree_metadata":{"x":%s,"y":%s},"use_zarr3":true,"use_ocdbt":null}' % (value % b"string", skipped)
    yield b'{"a.0":"text"}'
    yield struct.pack("<4q", 0, 40, -1, -1)


def torch_files() -> Iterator[bytes]:
    """Yields files of torch.save: nested states with views, objects, and what cannot be read."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def named(name: bytes, arguments: bytes) -> bytes:
        return b"c" + name + b"\n(" + arguments + b"tR"

    def ints(*values: int) -> bytes:
        return b"(" + b"".join(b"K" + bytes([value]) for value in values) + b"t"

    def tensor(key: str, first: int, sizes: bytes, strides: bytes, function: bytes = b"_rebuild_tensor_v2") -> bytes:
        storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + b"K\x0ctQ"
        end = b"\x89" + named(b"collections\nOrderedDict", b"")
        return named(b"torch._utils\n" + function, storage + b"K" + bytes([first]) + sizes + strides + end)

    def made(name: bytes, state: dict[str, bytes]) -> bytes:
        return b"c" + name + b"\n)\x81}(" + b"".join(text(key) + value for key, value in state.items()) + b"ub"

    def dtensor(local: bytes, sizes: bytes, coordinate: bytes, layout: bytes, *placements: bytes) -> bytes:
        mesh = made(b"torch.distributed.device_mesh\nDeviceMesh", {"_layout": layout, "_coordinate_on_dim": coordinate})
        spec = {"mesh": mesh, "placements": b"(" + b"".join(placements) + b"t"}
        parts = {"_local_tensor": local, "_spec": made(b"torch.distributed.tensor._dtensor_spec\nDTensorSpec", spec)}
        state = b"N}(" + b"".join(text(key) + value for key, value in parts.items()) + b"u\x86"
        kind = b"ctorch.distributed.tensor\nDTensor\n"
        arguments = kind + b"ctorch\nfloat32\n" + sizes
        return named(
            b"torch._tensor\n_rebuild_from_type_v2",
            b"ctorch._utils\n_rebuild_wrapper_subclass\n" + kind + b"(" + arguments + b"t" + state,
        )

    def shard(dim: int, factor: int | None = None) -> bytes:
        kind = b"torch.distributed.tensor.placement_types\n" + (b"Shard" if factor is None else b"_StridedShard")
        more = {} if factor is None else {"split_factor": b"K" + bytes([factor])}
        return made(kind, {"dim": b"K" + bytes([dim]), **more})

    def layout(*sizes: int) -> bytes:
        flat = [made(b"torch.distributed._mesh_layout\n_FlatLayout", {"shape": ints(size)}) for size in sizes]
        return made(b"torch.distributed._mesh_layout\n_MeshLayout", {"axes": b"(" + b"".join(flat) + b"t"})

    def file(values: dict[str, bytes], **more: bytes) -> bytes:
        entries = b"".join(text(key) + value for key, value in values.items())
        content = {"data.pkl": b"\x80\x02}(" + entries + b"u.", "byteorder": b"little", **more}
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in content.items():
                archive.writestr(zipfile.ZipInfo(f"m/{name}"), data)
        return out.getvalue()

    storages = {"data/0": bytes(range(48)), "data/1": bytes(48)}
    plain = tensor("0", 0, ints(3, 4), ints(4, 1))
    yield file({"a": plain, "b": tensor("1", 3, ints(2, 2), ints(1, 3)), "c": b"K\1"}, **storages)
    yield file(
        {"m": b"}(" + text("w") + plain + text("x") + plain + b"u", "l": b"](" + plain + b"}N\x88se"}, **storages
    )
    shared = text("s") + b"q\1](" + text("long text") + b"h\1eq\2"
    yield file({"o": b"(G" + bytes(8) + shared + b"h\2t", "n": b"cm\nC\n)\x81}" + text("k") + b"K\1sb"})
    yield file({"s": tensor("0", 0, ints(2), ints(1), b"_rebuild_qtensor"), "t": b"(" + plain + b"t"}, **storages)
    yield file({"e": tensor("0", 0, ints(2, 2), ints(0, 1)), "z": tensor("0", 0, ints(0), ints(1))}, **storages)
    local, replicate = (
        tensor("0", 0, ints(2, 4), ints(4, 1)),
        made(b"torch.distributed.tensor.placement_types\nReplicate", {}),
    )
    yield file({"d": dtensor(local, ints(3, 4), ints(0), layout(2), shard(0))}, **storages)
    yield file({"d": dtensor(local, ints(2, 4), ints(1, 0), layout(2, 2), replicate, replicate)}, **storages)
    yield file({"d": dtensor(local, ints(8, 4), ints(1, 0), layout(2, 2), shard(0, 2), shard(0))}, **storages)
    older = made(b"torch.distributed._mesh_layout\n_MeshLayout", {"shape": ints(2), "stride": ints(1)})
    yield file({"d": dtensor(local, ints(2, 8), b"]K\1a", older, shard(1))}, **storages)
    arguments = local.partition(b"(")[2][:-1]
    attributes = b"ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n(" + arguments + b"}"
    yield file({"a": named(b"torch._tensor\n_rebuild_from_type_v2", attributes)}, **storages)
    yield file({}, **{"constants.pkl": b""})
    yield b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def seeds() -> Iterator[tuple[str, bytes]]:
    trees = [b"\0", b"\3" + bytes(8), b"\7" + struct.pack("<I", 3) + b"\0\1\2", b"\x05\2\0\0\0ab", b"\6\1\0\0\0\xff"]
    trees.append(b"\x09\2\0\0\0" + trees[3] + b"\x08\2\0\0\0" + trees[1] + b"\4" + bytes(8))
    by_target: dict[str, list[bytes]] = {
        "block_ranges": [
            b"",
            b"\0",
            varints(1, 0, 0, 1),
            varints(2, 0, 3, 5, 2, 0, 1),
            varints(2, 0, 300, 70000, 0, 1, 9),
        ],
        "builtin_archive": [*archives()],
        "data_file": [data_file(b""), data_file(b"record"), b"__3_1.0001020304050607.distcp", b"__0_0.distcp"],
        "foreign_metadata": [*foreign(), *rare_foreign(), *byte_checkpoint()],
        "inventory_blob": [blob for blob, _ in inventories()],
        "manifest": [*manifests()],
        "manifest_view": [*map(without_pickle, ours())],
        "metadata_file": [*map(without_pickle, ours()), *ours()],
        "orbax": [*orbax()],
        "pickle_reader": [*pickles(), *standard(), *foreign()],
        "pickle_tree": [*pickles()],
        "safetensors": [*safetensors()],
        "standard_pickle": [*pickles(), *standard()],
        "torch_archive": [*archives()],
        "torch_file": [*torch_files(), *archives()],
        "tree": trees,
        "write_result": [*write_results()],
        "zip_record": [
            bytes([dtype]) + struct.pack(f"<I{len(sizes)}q", place, *sizes)
            for dtype, place, sizes in [
                (1, 64, (2, 3)),
                (5, 65, ()),
                (9, 0, (0, 7)),
                (20, 1, (1 << 20,)),
                (2, 7, (1 << 40, 9)),
            ]
        ],
    }
    for blob, boxes in inventories():
        parts = [
            varints(1, boxes, 0),
            varints(1, boxes, 1, 0, 0),
            varints(1, boxes, 1, 0, 2, 3),
            varints(1, boxes, 2, 0, 0, 1, 0),
        ]
        by_target.setdefault("rank_assignment", []).extend(struct.pack("<I", len(blob)) + blob + part for part in parts)
    for target, contents in by_target.items():
        yield from ((target, content) for content in contents)


def main() -> None:
    for target, content in seeds():
        folder = Path(sys.argv[1]) / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)


if __name__ == "__main__":
    main()
