# SPDX-License-Identifier: Apache-2.0
"""How the record of an object becomes a value without running code of the checkpoint."""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import torch

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CorruptCheckpointError, UnsafeObjectError
from bytecheckpoint.native import _core

__all__ = ["load_plain_data", "plain_object", "plain_record"]

# Files that torch.save wrote before it wrote archives have five pickles, then the elements.
_PICKLES_OF_OLD_FILES = 5
# An archive may say that it holds at most this many times its own bytes. torch.save compresses nothing.
_MOST_INFLATED = 16

# An attribute of entries of archives.
_IS_FOLDER = 0x10

# This pickle protocol keeps the `fold` of a time, and whether an array is writable. Earlier ones lose them.
_KEEPS_ALL = 5


def plain_object(fqn: str, buffer: bytearray, config: Config) -> Any:
    """Returns the object of a record. C++ reads it if it has only builtin and standard types, else torch does."""
    value = _read_by_cpp(fqn, buffer, _core.load_builtin) or _read_by_cpp(fqn, buffer, _core.load_standard)
    return load_plain_data(fqn, buffer, config, map_location=None) if value is None else value[0]


def plain_record(fqn: str, buffer: bytearray, config: Config) -> bytes | bytearray:
    """Returns the bytes of an object that run no code of the checkpoint, whoever unpickles them.

    If C++ can read the value, it is written anew. Bytes can be made such that two readers read them in two ways, so
    what C++ found harmless in them may still harm when torch reads them. If C++ cannot read it, torch loads it under
    its ``weights_only`` rules as a check, and the bytes are returned as they are.
    """
    value = _read_by_cpp(fqn, buffer, _core.load_builtin)
    record = None if value is None else _core.dump_builtin(value[0])
    if record is not None:
        return record
    value = value or _read_by_cpp(fqn, buffer, _core.load_standard)
    if value is not None:
        again = io.BytesIO()
        torch.save(value[0], again, pickle_protocol=_KEEPS_ALL)
        return again.getvalue()
    load_plain_data(fqn, buffer, config)
    return buffer


def _read_by_cpp(fqn: str, buffer: bytearray, read: Callable[[bytearray], tuple[Any] | None]) -> tuple[Any] | None:
    """Returns the value of a record in a tuple, or None if ``read`` does not know the format or a type."""
    try:
        return read(buffer)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None


def load_plain_data(fqn: str, buffer: bytearray, config: Config, map_location: str | None = "cpu") -> Any:
    """Loads what torch.save wrote, under torch's ``weights_only`` rules unless ``config.allow_pickle``.

    Raises:
        UnsafeObjectError: The rules refuse it. The message names the key and the types.
        CorruptCheckpointError: Reading it would take far more memory than it has bytes, or an entry of the archive is
            damaged, which torch.load does not notice. With ``config.verify``.
    """
    load: Callable[..., Any] = torch.load
    file = io.BytesIO(buffer)
    _check_archive(fqn, buffer, file, config)
    if not config.allow_pickle:
        _check_memo(fqn, buffer, file)
    try:
        return load(file, map_location=map_location, weights_only=not config.allow_pickle)
    except Exception as error:
        if config.allow_pickle:
            raise
        raise UnsafeObjectError(
            f"'{fqn}' is not plain data under torch's weights_only rules ({_offenders(buffer, error)}); if you trust "
            "this checkpoint, add its types with torch.serialization.add_safe_globals, or pass "
            "BcpReader(..., config=Config(allow_pickle=True)), which may run code of the checkpoint"
        ) from None


def _check_memo(fqn: str, buffer: bytearray, file: io.BytesIO) -> None:
    """Refuses pickles whose memo would be far larger than the pickle, and archives that torch cannot read.

    The memo of torch's ``weights_only`` unpickler only grows by its entries. But another planner gives the checked
    bytes to Python's unpickler, whose memo is an array: five bytes of pickle make it 64 GiB.

    Raises:
        CorruptCheckpointError: It is such a pickle or archive.
    """
    try:
        pickled = _compat.archived_pickle(file)
    except (RuntimeError, UnicodeDecodeError) as error:  # the text of torch's error may have damaged names
        raise CorruptCheckpointError(f"'{fqn}': torch cannot read its archive: {_first_line(error)}") from None
    finally:
        file.seek(0)
    try:
        if pickled is None:
            _core.check_memo(buffer, _PICKLES_OF_OLD_FILES)
        else:
            _core.check_memo(pickled, 1)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"'{fqn}': {error}") from None


def _check_archive(fqn: str, buffer: bytearray, file: io.BytesIO, config: Config) -> None:
    """Refuses archives whose entries claim to inflate to far more bytes than plausible, or fail their checksums."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            num_bytes = sum(entry.file_size for entry in entries)
            if num_bytes > _MOST_INFLATED * len(buffer):
                raise CorruptCheckpointError(
                    f"'{fqn}': an archive of {len(buffer):,} bytes claims to hold {num_bytes:,} bytes"
                )
            has_checksums = any(entry.CRC for entry in entries)  # torch can be told to write zeros
            damaged = archive.testzip() if config.verify and has_checksums else None
            # torch reads nothing of what is marked as a folder, and leaves the memory as it was.
            folders = (entry.filename for entry in entries if entry.file_size and entry.external_attr & _IS_FOLDER)
            damaged = damaged or next(folders, None)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError):
        return  # not an archive, or none that Python can read
    except (zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise CorruptCheckpointError(f"'{fqn}': its archive cannot be unpacked: {error}") from None
    finally:
        file.seek(0)
    if damaged is not None:
        raise CorruptCheckpointError(
            f"'{fqn}': entry '{damaged}' of its archive fails its CRC, or is marked as a folder"
        )


def _offenders(buffer: bytearray, error: Exception) -> str:
    """Returns the classes and functions that ``weights_only`` refuses in ``buffer``, or torch's message if unknown."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer))
    except Exception:
        names = []
    return ", ".join(sorted(names)) or _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or repr(error)
