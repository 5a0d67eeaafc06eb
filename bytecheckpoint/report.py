# SPDX-License-Identifier: Apache-2.0
"""What a save or a load did, as this rank saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LoadReport", "SaveReport"]


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One rank's part of a committed or handed-in save.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits, drawn by the coordinator; "" on other ranks, which are not told.
        num_records: Records this rank wrote.
        bytes_written: Bytes of this rank's files.
        stage_s: Seconds spent copying, summing and waiting for slots.
        flush_s: Seconds spent waiting for the last writes.
        sync_s: Seconds spent in fsync.
        commit_s: Seconds of the commit; 0 on ranks that do not coordinate.
        files_swept: Data files of older saves that the commit removed.
        warnings: What went wrong after the commit and did not undo it.
    """

    path: str
    save_id: str
    num_records: int = 0
    bytes_written: int = 0
    stage_s: float = 0.0
    flush_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    files_swept: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """One rank's part of a load.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits.
        num_boxes: Stored boxes that were read into tensors or buffers.
        num_files: Data files that were opened.
        bytes_wanted: Bytes of those boxes.
        bytes_read: Bytes read for them: whole blocks of 256 KiB, each once.
        seconds: Reading, verifying and scattering.
    """

    path: str
    save_id: str
    num_boxes: int = 0
    num_files: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
