# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, one class a kind.

Every exception here survives pickling and unpickling: DCP gathers exceptions from all ranks, and one that does not come
back kills one side of the gather and leaves its peers waiting.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

__all__ = [
    "CheckpointBusyError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointSupersededError",
    "ConfigError",
    "CorruptCheckpointError",
    "DeviceError",
    "DurabilityUnknownError",
    "FormatVersionError",
    "InvalidPlanError",
    "KeyMismatchError",
    "ProcessGroupChangedError",
    "RankError",
    "RankLostError",
    "SaveCancelledError",
    "SaveFailedError",
    "ShapeMismatchError",
    "StagingBusyError",
    "StagingFullError",
    "StorageError",
    "UnsafeObjectError",
    "UnsupportedError",
]


class CheckpointError(Exception):
    """Base of all errors of this package.

    Attributes:
        path: File or directory it is about, or "".
        errno: Of the system call that failed, or 0.
    """

    def __init__(self, message: str, path: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.errno: int | None = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.path, self.errno), self._notes()

    def _notes(self) -> dict[str, list[str]] | None:
        """State to unpickle: what ``add_note`` added."""
        notes = getattr(self, "__notes__", None)
        return {"__notes__": notes} if notes else None


class InvalidPlanError(CheckpointError, ValueError):
    """A plan or a tensor asks for what cannot be stored or loaded; the message names the key."""


class KeyMismatchError(CheckpointError, KeyError):
    """A key or a chunk is wanted that the checkpoint does not have."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print its repr


class ShapeMismatchError(CheckpointError, ValueError):
    """A tensor to load into has another shape than what is wanted of the checkpoint."""


class ConfigError(CheckpointError, ValueError):
    """A setting has an impossible value, or a ``BYTECHECKPOINT_`` variable is not known."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at that path and ``overwrite=False``."""


class CheckpointBusyError(CheckpointError):
    """Another save is under way at that path."""


class CheckpointSupersededError(CheckpointError):
    """A newer save, or its deadline, took this save's right to commit. Nothing of the old checkpoint is lost."""


class ProcessGroupChangedError(CheckpointError, RuntimeError):
    """The process group that a save was called with was destroyed, or replaced, before the save could use it.

    Nothing is committed; the checkpoint before it stays.
    """


class OutOfStepError(CheckpointError, RuntimeError):
    """Ranks came to one save with different calls, or this call was skipped so that they are in step again.

    Nothing is committed; the checkpoint before it stays.

    Attributes:
        calls: How many calls each rank had made, by number in the process group; empty for a call that was skipped.
    """

    def __init__(self, message: str, calls: Mapping[int, int] | None = None, path: str = "") -> None:
        super().__init__(message, path)
        self.calls = dict(calls or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.calls, self.path), self._notes()


class CheckpointChangedError(CheckpointError):
    """A newer commit replaced the checkpoint while it was loaded. Load again."""


class CorruptCheckpointError(CheckpointError):
    """Bytes on disk are not what was written."""


class FormatVersionError(CheckpointError):
    """Written by a newer version of the format."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """Valid, but not handled by this version."""


class StorageError(CheckpointError, OSError):
    """The file system refused; ``errno`` and ``path`` say what and where."""


class DurabilityUnknownError(StorageError):
    """The checkpoint is committed and loads; whether it survives power loss is not known."""


class DeviceError(CheckpointError, RuntimeError):
    """An accelerator refused; the message says what. CUDA reports faults late: an earlier kernel may be the cause."""


class UnsafeObjectError(CheckpointError):
    """An object in the checkpoint is not plain data under torch's ``weights_only`` rules."""


class StagingBusyError(CheckpointError):
    """States that wait to be saved take all memory for them, and ``on_staging_busy="raise"``; or one takes it that is
    kept for no save."""


class StagingFullError(CheckpointError, MemoryError):
    """A state is larger than the memory for it; nothing was copied. The message says what it takes."""


class RankError(CheckpointError):
    """Stands for an exception that cannot be sent between processes; its type and text are in the message."""


class RankLostError(CheckpointError):
    """A rank died, stopped or gave up while others waited for it. The checkpoint that was there is whole.

    The process group is of no use any more; what is left of the ranks can make another one.

    Attributes:
        ranks: What became of whom, as far as it is known, by number in the process group.
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None, path: str = "") -> None:
        super().__init__(message, path)
        self.ranks = dict(ranks or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.ranks, self.path), self._notes()


class SaveCancelledError(CheckpointError):
    """A save was given up before it was committed; the previous checkpoint is whole."""


class SaveFailedError(CheckpointError):
    """A save failed on some ranks and was undone; the previous checkpoint is whole.

    Attributes:
        reasons: What was raised, by rank.
    """

    def __init__(self, message: str, reasons: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.reasons), self._notes()


# In the order of `base::Code` in csrc/base/status.h.
_CLASSES: tuple[type[CheckpointError], ...] = (
    CheckpointError,
    InvalidPlanError,
    CheckpointNotFoundError,
    CheckpointExistsError,
    CheckpointBusyError,
    CheckpointSupersededError,
    CheckpointChangedError,
    CorruptCheckpointError,
    FormatVersionError,
    UnsupportedError,
    StorageError,
    DurabilityUnknownError,
    CheckpointError,
    StagingBusyError,
    StagingFullError,
    DeviceError,
)


def from_status(code: int, message: str, path: str, sys_errno: int) -> CheckpointError:
    """The exception for a ``base::Status``; called by the extension modules."""
    return _CLASSES[code](message, path, sys_errno)


# An exception goes to all ranks; what is longer goes as a text that is cut.
_MAX_SENT_BYTES = 4 << 20
_MAX_TEXT_CHARS = 16 << 10


def sendable(error: BaseException) -> BaseException:
    """``error`` if another process can unpickle and print it and it is not huge, else a RankError in its place."""
    text, is_whole = _text_of(error)
    try:
        # Ours may hold such texts of several ranks already.
        pickled = pickle.dumps(error) if is_whole or isinstance(error, CheckpointError) else b""
        if 0 < len(pickled) <= _MAX_SENT_BYTES and type(pickle.loads(pickled)) is type(error):
            return error
    except BaseException:  # whatever it is, somebody waits for the answer
        pass
    return RankError(f"{type(error).__module__}.{type(error).__qualname__}: {text}")


def _text_of(error: BaseException) -> tuple[str, bool]:
    """What it says, and whether that is all."""
    try:
        text = str(error)
    except BaseException as of_text:
        return f"(it cannot say what: its __str__ raises {type(of_text).__qualname__})", False
    if len(text) <= _MAX_TEXT_CHARS:
        return text, True
    return f"{text[:_MAX_TEXT_CHARS]}... (cut: {len(text)} characters)", False
