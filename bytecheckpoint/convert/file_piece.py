# SPDX-License-Identifier: Apache-2.0
"""A piece of a target that is one file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.small_files import replaced_by, write_small_file

__all__ = ["compare_checksums", "note_checksums", "remove_unverified", "write_file"]

# Ends the name of a note of what a piece has read of stretches of the source that have one checksum for several pieces.
_CHECKSUMS = ".checksums"
# Ends the name of a note of the CRC with which a file was written and read back.
_READ_BACK = ".crc"


def note_checksums(piece: Path, opened: Opened) -> None:
    """Notes the checksums of what a piece has read, if others must be known to compare them.

    Args:
        piece: Path of the piece, which is not there yet.
        opened: The source.
    """
    taken = _core.take_checksums(opened.wanted)
    if taken:
        write_small_file(piece.with_name(piece.name + _CHECKSUMS), taken, sync_folder=False)


def remove_unverified(files: Iterable[Path]) -> None:
    """Removes files of an earlier run that were not read back, or are no longer what they were then.

    Args:
        files: Paths of pieces, which need not be there.
    """
    for file in files:
        note = file.with_name(file.name + _READ_BACK)
        if not file.is_file():
            continue
        found = _core.checksum_of_file(str(file.parent), file.name, None) if note.is_file() else None
        if found is None or note.read_text() != str(found):
            file.unlink()


def compare_checksums(source: Source, opened: Opened, folder: Path) -> None:
    """Compares the checksums of a source that are of what several pieces have read.

    Args:
        source: The source.
        opened: The same, opened.
        folder: Folder of the pieces. No note of them is left there.

    Raises:
        CorruptCheckpointError: The source is damaged.
    """
    notes = sorted(folder.glob(f"*{_CHECKSUMS}"))
    with naming_keys(opened.stored):
        taken = [note.read_bytes() for note in notes]
        _core.compare_checksums(opened.wanted, taken, directory=source.place, progress=None)
    for note in (*notes, *folder.glob(f"*{_READ_BACK}")):
        note.unlink()


def write_file(file: Path, opened: Opened, verify: bool, export: Callable[[str], tuple[int, int]]) -> None:
    """Writes a file, which gets its name when it is whole and on disk.

    Args:
        file: Its path.
        opened: What it is written from.
        verify: Whether to read it back, past the page cache, and compare it.
        export: Writes it to a path, and returns its bytes and their CRC, which is needed to verify alone.

    Raises:
        CorruptCheckpointError: What was read back is not what was written.
    """
    with replaced_by(_core.Directory(str(file.parent)), file.name, f"{file.name}.part") as part:
        _, crc = export(str(part))
        note_checksums(file, opened)
        if verify:
            found = _core.checksum_of_file(str(part.parent), part.name, None)
            if found != crc:
                raise CorruptCheckpointError(
                    f"convert({file}): written with CRC {crc}, read back with {found}", str(file)
                )
            note = file.with_name(file.name + _READ_BACK)
            write_small_file(note, str(found).encode(), sync_folder=False)
