# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.read``: tensors and objects of a checkpoint, without a state to load them into. Imports torch."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import Contents, Item, Part, open_contents
from bytecheckpoint.contents.safe_objects import plain_object
from bytecheckpoint.contents.values import Box, Values
from bytecheckpoint.errors import CheckpointError, ConfigError, CorruptCheckpointError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.patterns import matches
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _C
from bytecheckpoint.near_names import nearest
from bytecheckpoint.report.text import size_text
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.storage.parts import parsed_user_metadata
from bytecheckpoint.storage.paths import location_to_read
from bytecheckpoint.storage.small_files import storage_errors

__all__ = ["StoredState", "read"]

# Tensors of fewer bytes are read together with those behind them, up to so many bytes; larger ones alone.
_SMALL_BYTES, _AHEAD_BYTES = 1 << 20, 32 << 20
_ALIGNMENT = 64
_MOST_NAMES = 5


class StoredState(Mapping[str, Any]):
    """The tensors and objects of a checkpoint by name. Each is read when it is first asked for.

    Objects are kept from then on. Of tensors it keeps none but small ones that it reads ahead, 32 MiB at most, while
    values are asked for in order. So going through a checkpoint that is larger than the memory takes the memory of one
    tensor. While somebody holds a tensor,
    asking again gives the same one. Any thread may ask.

    Attributes:
        path: Path or URL of the checkpoint.
        user_metadata: What was passed to the save as ``user_metadata``; None if nothing was.

    Args:
        contents: One part, opened with its chunks.
        spec: What of it is there, under which names.
        config: Settings.
    """

    def __init__(self, contents: Contents, spec: LoadSpec | None, config: Config) -> None:
        (part,) = contents.parts
        self.path = contents.path
        self.user_metadata = parsed_user_metadata(part.checkpoint.user_metadata, self.path)
        self._part, self._config, self._spec = part, config, spec
        self._maps = _can_be_mapped(part, spec, config)
        self._items = [*part.items.values()]
        self._place = {item.name: place for place, item in enumerate(self._items)}
        self._last = -1  # place of the value that was asked for last
        self._objects: dict[str, Any] = {}
        self._ahead: dict[str, torch.Tensor] = {}
        self._held: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._lock = ForkSafeLock()

    def __getitem__(self, key: str) -> Any:
        """Returns a value, and reads it if it was not.

        Raises:
            KeyError: There is no such key. The message names the nearest.
            CorruptCheckpointError: Bytes of it are not what was written.
            CheckpointError: It cannot be read: the checkpoint was replaced or removed, the storage refuses, or an
                object is no plain data.
        """
        item = self._part.items.get(key)
        if item is None:
            near = nearest(key, self._part.items, _MOST_NAMES)
            raise KeyError(f"read({self.path}): there is no {key!r}" + (f"; near it {listed(near)}" * bool(near)))
        with self._lock:
            is_next = self._place[key] == self._last + 1
            self._last = self._place[key]
            if item.dtype is None:
                if key not in self._objects:
                    self._objects[key] = self._object(item)
                return self._objects[key]
            tensor = self._held.get(key)
            if tensor is None:
                tensor = self._ahead.pop(key) if key in self._ahead else self._tensor(item, is_next)
                self._held[key] = tensor
            return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._part.items

    def __iter__(self) -> Iterator[str]:
        return iter(self._part.items)

    def __len__(self) -> int:
        return len(self._part.items)

    def __repr__(self) -> str:
        items = self._part.items.values()
        num_tensors = sum(item.dtype is not None for item in items)
        size = size_text(sum(item.num_bytes for item in items))
        return f"<StoredState of {self.path}: {num_tensors:,} tensors, {len(items) - num_tensors:,} objects, {size}>"

    def _object(self, item: Item) -> Any:
        (record,) = self._reader([]).read_objects([item.name])
        return plain_object(item.name, bytearray(record), self._config)

    def _tensor(self, item: Item, is_next: bool) -> torch.Tensor:
        """Reads a tensor; if values are asked for one after the other, small ones behind it, too."""
        if not _is_plain(item):
            box = Box((0,) * len(item.shape), item.shape)
            return self._cast(item, Values(self._part, self._config).read_across(item, box)[0])
        mapped = self._mapped(item) if self._maps and item.num_bytes >= _SMALL_BYTES else None
        if mapped is not None:
            return mapped
        together = self._together(item) if is_next else []
        if len(together) > 1:
            with suppress(CheckpointError):  # it may be of one of the others
                self._ahead = self._read_together(together)
                return self._ahead.pop(item.name)
        reader = self._reader([item.name])
        (stored,) = reader.dtypes
        if stored is None:  # it has no elements
            return self._cast(item, torch.empty(item.shape, dtype=getattr(torch, str(item.dtype)), device="cpu"))
        numel = math.prod(item.shape)
        memory = torch.empty(numel * stored[1], dtype=torch.uint8, device="cpu")
        self._run(item, reader, 0, numel, memory)
        return self._cast(item, memory.view(getattr(torch, stored[0])).reshape(item.shape))

    def _together(self, item: Item) -> list[Item]:
        """Returns a small tensor and the small ones behind it, up to a limit."""
        chosen, num_bytes = [], 0
        for each in itertools.islice(self._items, self._place[item.name], None):
            if not 0 < item.num_bytes < _SMALL_BYTES or num_bytes >= _AHEAD_BYTES:
                break
            if _is_plain(each) and 0 < each.num_bytes < _SMALL_BYTES and not each.is_partial:
                chosen.append(each)
                num_bytes += each.num_bytes
        return chosen

    def _read_together(self, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        """Reads small tensors at once, each into memory of its own."""
        reader = self._reader([item.name for item in items])
        dtypes: list[tuple[str, int]] = [stored or ("uint8", 1) for stored in reader.dtypes]
        numels = [math.prod(item.shape) for item in items]
        begins = [0]
        for numel, (_, itemsize) in zip(numels, dtypes, strict=True):
            begins.append(begins[-1] + -(-numel * itemsize // _ALIGNMENT) * _ALIGNMENT)
        scratch = torch.empty(begins[-1], dtype=torch.uint8, device="cpu")
        wanted = [(number, 0, numel, begin) for number, (numel, begin) in enumerate(zip(numels, begins, strict=False))]
        reader.read(wanted, scratch.numpy().data)
        return {
            item.name: self._cast(
                item,
                scratch[begin : begin + numel * itemsize].clone().view(getattr(torch, name)).reshape(item.shape),
            )
            for item, numel, (name, itemsize), begin in zip(items, numels, dtypes, begins, strict=False)
        }

    def _mapped(self, item: Item) -> torch.Tensor | None:
        """Returns a tensor whose memory is the file, of which it gets a page of its own where it is written to.

        All its blocks are compared with their checksums before, which reads it once.
        """
        chunks = item.chunks or ()
        places = self._part.checkpoint.elements(item.name)
        whole = len(chunks) == 1 and chunks[0].sizes == item.shape and places[0] is not None
        if not whole or places[0] is None or chunks[0].file is None:
            return None
        offset, num_bytes = places[0]
        dtype: torch.dtype = getattr(torch, str(item.dtype))
        if num_bytes != item.num_bytes or offset % dtype.itemsize:
            return None
        numel, reader = math.prod(item.shape), self._reader([item.name])
        if reader.dtypes != [(item.dtype, dtype.itemsize)]:
            return None
        scratch = torch.empty(min(num_bytes, _AHEAD_BYTES), dtype=torch.uint8, device="cpu")
        at_once = scratch.numel() // dtype.itemsize
        for first in range(0, numel, at_once):
            self._run(item, reader, first, min(first + at_once, numel), scratch)
        begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        directory = self._part.checkpoint.data_directory(self.path)
        path = Path(directory, chunks[0].file)
        with storage_errors("map", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                mapped = mmap.mmap(descriptor, offset + num_bytes - begin, access=mmap.ACCESS_COPY, offset=begin)
            finally:
                os.close(descriptor)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=offset - begin).reshape(item.shape)

    def _cast(self, item: Item, tensor: torch.Tensor) -> torch.Tensor:
        casts = self._spec.cast if self._spec is not None and isinstance(self._spec.cast, Mapping) else {}
        for pattern, dtype in casts.items():
            if matches(pattern, item.name):
                return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        return tensor

    def _run(self, item: Item, reader: Any, first: int, last: int, memory: torch.Tensor) -> None:
        """Reads elements of the one tensor of a reader. Damage names it."""
        try:
            reader.read([(0, first, last, 0)], memory.numpy().data)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"'{item.name}': {error}", error.path) from error

    def _reader(self, names: Sequence[str]) -> Any:
        config = self._config
        return _C.RowMajorReader(
            self._part.checkpoint,
            names,
            directory=self._part.path,
            rank=self._part.rank,
            direct_io=config.direct_io and not self._maps,  # what is mapped comes from the page cache
            verify=config.verify,
            num_io_threads=config.load_io_threads or config.io_threads,
            ring_bytes=config.ring_bytes,
            io_timeout_s=config.io_timeout_s,
        )


def read(
    place: str | os.PathLike[str],
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    *,
    spec: LoadSpec | None = None,
    config: Config | None = None,
) -> StoredState:
    """Opens a checkpoint to read whole tensors by name, without a state: for notebooks, evaluations and scripts.

    Local: each process reads for itself, and no process group is needed. The call reads the metadata alone, as
    ``bcp ls`` does; values are read when they are asked for::

        state = bytecheckpoint.read("run/step-300", include="model")
        weight = state["model.embed.weight"]  # a tensor in host memory
        model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})

    Every value is checked as in a load. On a local file system a large tensor that is stored in one piece, in a
    checkpoint of ours, is mapped rather than read: its bytes are compared with their checksums once, then its memory
    is that of the file. Such a tensor may be written to; that changes neither the file nor other tensors. All other
    tensors are read into memory of their own. The checkpoint must stay while values are read; if another save
    replaces it, that is an error, and never a mixture.

    Args:
        place: Path or URL of a checkpoint, of any format that ``load_state_dict`` reads; of ``bytecheckpoint.save`` one
            part, such as ``run/global_step_300/model``.
        include: Patterns of the names to take, as ``LoadSpec`` has them; none: all.
        exclude: Patterns of names that are left out.
        spec: Instead of patterns: what to take, under which names, in which form. Its ``cast`` may be a dict of
            patterns and dtypes; ``strict`` says nothing here.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        The values by name, in the order of ``bcp ls``; tensors in host memory, with the dtype that they are stored in.

    Raises:
        CheckpointError: There is no such checkpoint, or its metadata cannot be read; see ``BcpReader``.
        ConfigError: A pattern is none, or matches nothing; both patterns and a spec were passed; or the folder has
            several parts.
    """
    config = config or Config.from_env()
    if spec is not None and (include or exclude):
        raise ConfigError(f"read({place}): pass patterns or a spec, not both: LoadSpec takes include and exclude")
    if spec is None and (include or exclude):
        spec = LoadSpec(include=include, exclude=exclude)
    path = str(location_to_read(place))
    contents = open_contents(path, config=config, with_chunks=True, kind=_C.Checkpoint)
    if len(contents.parts) > 1:
        paths = dict.fromkeys(part.path for part in contents.parts)
        which = f"pass the path of one: {listed([*paths])}" if len(paths) > 1 else "ranks have saved them alone"
        raise ConfigError(f"read({path}): there are {len(contents.parts)} parts: {which}", path)
    if spec is not None:
        contents = open_contents(path, config=config, with_chunks=True, kind=_C.Checkpoint, spec=spec)
    return StoredState(contents, spec, config)


def _can_be_mapped(part: Part, spec: LoadSpec | None, config: Config) -> bool:
    """Whether large tensors of a checkpoint may be mapped.

    Files of others may be written in place, which would change the memory, or end the process if they are cut.
    """
    from bytecheckpoint.native import _core

    is_plain = spec is None or not (spec.rename or spec.transforms or isinstance(spec.cast, Mapping))
    if part.is_foreign or not is_plain or "://" in part.path or not config.verify:
        return False
    try:
        return _core.is_local(part.path, config.io_timeout_s)
    except CheckpointError:
        return False


def _is_plain(item: Item) -> bool:
    dtype = getattr(torch, item.dtype or "", None)
    return isinstance(dtype, torch.dtype) and dtype in _compat.PLAIN_DTYPES
