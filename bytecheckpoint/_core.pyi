# SPDX-License-Identifier: Apache-2.0
# The extension module that needs no torch: format, planning and checks. The headers in csrc/ have the contracts; this
# stub has the types. tests/lint/test_stubs.py compares the names.
from collections.abc import Callable, Collection, Sequence, Set
from pathlib import Path
from types import CodeType
from typing import Any

from bytecheckpoint._both import Checkpoint as Checkpoint
from bytecheckpoint._both import PartBuffer as PartBuffer
from bytecheckpoint._both import RowMajorReader as RowMajorReader
from bytecheckpoint._both import ViewBuilder as ViewBuilder
from bytecheckpoint._both import ViewTensor as ViewTensor

def build_info() -> dict[str, Any]: ...

PHASES: tuple[str, ...]
REMOVAL_NOTE: bytes

def decode_trace(encoded: bytes) -> dict[str, Any]: ...
def trace_columns(encoded: Sequence[bytes]) -> dict[str, Any]: ...
def available_memory_bytes() -> int: ...
def dtype_names() -> list[str]: ...
def boxes_of_flat_shard(
    tensors: Sequence[tuple[Sequence[int], int]], begin: int, end: int
) -> list[list[tuple[tuple[int, ...], tuple[int, ...], int]]]: ...
def block_cuts(sizes: Sequence[int], cuts: Sequence[int], min_block_elements: int) -> list[int]: ...
def dump_builtin(value: object) -> bytes | None: ...
def load_builtin(buffer: bytes | bytearray | memoryview) -> tuple[Any] | None: ...
def load_standard(buffer: bytes | bytearray | memoryview) -> tuple[Any] | None: ...
def is_standard(buffer: bytes | bytearray | memoryview) -> bool: ...
def check_memo(buffer: bytes | bytearray | memoryview, max_pickles: int) -> None: ...
def is_in_call(thread: int, frame: int, code: CodeType) -> bool: ...
def verify(
    directory: str,
    *,
    direct_io: bool,
    num_threads: int,
    ring_bytes: int,
    progress: Callable[[int, int], object] | None,
) -> dict[str, Any]: ...
def check_data_file(fd: int, path: str, *, num_threads: int) -> None: ...
def take_refusal_of_direct() -> bool: ...
def find_unreferenced(directory: str) -> tuple[list[str], list[str]]: ...
def inspect_folder(directory: str, own_tmp: str = "", ranks: Set[int] | None = None) -> dict[str, Any]: ...
def sync_directory(directory: str) -> None: ...
def is_local(path: str, io_timeout_s: float) -> bool: ...
def look_anew(directory: str) -> bool: ...

# An open directory. Its methods work in this directory, wherever its path leads later.
class Directory:
    def __init__(self, path: str) -> None: ...
    def below(self, name: str) -> Directory: ...
    @property
    def id(self) -> tuple[int, int]: ...
    @property
    def path(self) -> Path: ...
    def fileno(self) -> int: ...
    def sync(self) -> None: ...
    def remove(
        self, name: str, right: Removal | None = None, *, stays: Sequence[str] = (), dry_run: bool = False
    ) -> tuple[int, list[str], str]: ...
    def remove_empty(self, name: str) -> None: ...

# The right to remove what a checkpoint directory holds; the same right that a save takes. See
# csrc/engine/commit/removal.h.
class Removal:
    def __init__(self, directory: Directory) -> None: ...
    @property
    def tmp(self) -> str: ...
    def remove_marks(self) -> int: ...
    def check_right(self) -> None: ...
    def finish(self) -> None: ...

# Makes `client` serve the objects below `url`; see csrc/bridge/python_store.h.
def register_store(url: str, client: object) -> None: ...

class UploadParts:
    def __iter__(self) -> UploadParts: ...
    def __next__(self) -> PartBuffer: ...
    def fail(self, sys_errno: int, message: str) -> None: ...

# Checkpoints written from another one; see csrc/engine/export/copy_shard.h.
_Shard = tuple[Sequence[tuple[str, str, int, int]], Sequence[str]]

def copy_shard(
    checkpoint: Checkpoint,
    *,
    directory: str,
    target: str,
    rank: int,
    plain: bool,
    shard: _Shard,
    num_bytes: int,
    direct_io: bool,
    verify: bool,
    num_io_threads: int,
    ring_bytes: int,
    io_timeout_s: float,
    convert: Callable[[str, int, str, memoryview, str, memoryview], object] | None,
    computed: Collection[str],
    progress: Callable[[int], object] | None,
) -> bytes: ...
def copy_files(
    checkpoint: Checkpoint,
    *,
    source: str,
    target: str,
    direct_io: bool,
    num_threads: int,
    ring_bytes: int,
    niceness: int,
    bytes_per_s: int,
    io_timeout_s: float,
    progress: Callable[[int, int], object] | None,
) -> int: ...
def written_files(result: bytes) -> list[str]: ...
def assemble_copy(
    checkpoint: Checkpoint,
    *,
    shards: Sequence[_Shard],
    results: Sequence[bytes],
    planner_data: object,
    checkpoint_id: str,
    user_metadata: str,
) -> Checkpoint: ...

# Files of other formats, written from a checkpoint; see csrc/engine/export/export_file.h.
def export_file(
    checkpoint: Checkpoint,
    *,
    directory: str,
    path: str,
    head: bytes,
    tensors: Sequence[tuple[str, int, str]],
    file_bytes: int,
    direct_io: bool,
    verify: bool,
    num_io_threads: int,
    ring_bytes: int,
    io_timeout_s: float,
    convert: Callable[[str, int, str, memoryview, str, memoryview], object] | None,
    computed: Collection[str],
    progress: Callable[[int], object] | None,
    needs_crc: bool,
) -> tuple[int, int]: ...
def export_torch_file(
    checkpoint: Checkpoint,
    *,
    directory: str,
    path: str,
    pickle: bytes,
    tensors: Sequence[tuple[str, str, int]],
    held: Sequence[bytes],
    direct_io: bool,
    verify: bool,
    num_io_threads: int,
    ring_bytes: int,
    io_timeout_s: float,
    convert: Callable[[str, int, str, memoryview, str, memoryview], object] | None,
    computed: Collection[str],
    progress: Callable[[int], object] | None,
    needs_crc: bool,
) -> tuple[int, int]: ...
def typed_storage(dtype: str) -> str | None: ...
def take_checksums(checkpoint: Checkpoint) -> bytes: ...
def compare_checksums(
    checkpoint: Checkpoint, taken: Sequence[bytes], *, directory: str, progress: Callable[[int], object] | None
) -> None: ...
def checksum_of_file(directory: str, name: str, progress: Callable[[int], object] | None) -> int: ...
def safetensors_dtype(dtype: str) -> str | None: ...
