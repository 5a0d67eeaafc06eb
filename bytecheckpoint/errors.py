# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package, one class for each kind of failure.

Every exception here survives pickling and unpickling. DCP gathers the exceptions of all ranks: one that cannot be
unpickled kills one side of the gather and leaves its peers waiting.
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
    "LoadFailedError",
    "OutOfStepError",
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
    """Base class of all errors of this package.

    Attributes:
        path: File or directory that the error is about, or "".
        errno: ``errno`` of the system call that failed, or 0.
    """

    def __init__(self, message: str, path: str = "", errno: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.errno: int | None = errno

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.path, self.errno), self._state()

    def _state(self) -> dict[str, Any] | None:
        """Returns what to restore when the error is unpickled: the notes that ``add_note`` added."""
        notes = getattr(self, "__notes__", None)
        return {"__notes__": notes} if notes else None


class InvalidPlanError(CheckpointError, ValueError):
    """A plan or a tensor asks for something that cannot be stored or loaded. The message names the key."""


class KeyMismatchError(CheckpointError, KeyError, RuntimeError):
    """The checkpoint lacks a key or a chunk that the load wants."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print its repr


class ShapeMismatchError(CheckpointError, ValueError):
    """A tensor to load into and what it is to be filled with from the checkpoint differ in shape."""


class ConfigError(CheckpointError, ValueError):
    """A setting has an invalid value, or a ``BYTECHECKPOINT_`` variable is unknown."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path.

    Attributes:
        visible_within_s: Seconds within which one may still be seen that another machine has committed; 0 on a local
            file system.
    """

    visible_within_s: float = 0.0

    def _state(self) -> dict[str, Any]:
        return {**(super()._state() or {}), "visible_within_s": self.visible_within_s}


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is already a checkpoint at that path, and ``overwrite=False``."""


class CheckpointBusyError(CheckpointError):
    """Another save is under way at that path."""


class CheckpointSupersededError(CheckpointError):
    """This save lost its right to commit, to a newer save or at its deadline. Nothing of the old checkpoint is lost."""


class ProcessGroupChangedError(CheckpointError, RuntimeError):
    """The process group that a save was called with was destroyed or replaced before the save could use it.

    Nothing is committed; the previous checkpoint stays.
    """


class OutOfStepError(CheckpointError, RuntimeError):
    """The ranks met in one save with different calls, or this call was skipped to bring the ranks into step again.

    This happens after a call failed on one rank alone, before that rank met the others: they waited for it in that
    call, and met its next one. Nothing is committed; the previous checkpoint stays.

    Attributes:
        calls: Number of calls that each rank had made, by rank in the process group. Empty for a skipped call.
    """

    def __init__(self, message: str, calls: Mapping[int, int] | None = None, path: str = "") -> None:
        super().__init__(message, path)
        self.calls = dict(calls or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.calls, self.path), self._state()


class CheckpointChangedError(CheckpointError):
    """A newer commit replaced the checkpoint during the load. Load again."""


class CorruptCheckpointError(CheckpointError):
    """The bytes on disk differ from what was written."""


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a newer version of the format than this package reads."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """The request or the checkpoint is valid, but this version does not support it."""


class StorageError(CheckpointError, OSError):
    """The file system refused an operation. ``errno`` says why, and ``path`` where."""


class DurabilityUnknownError(StorageError):
    """The checkpoint is committed and loads, but it is not known whether it survives power loss."""


class DeviceError(CheckpointError, RuntimeError):
    """An accelerator reported an error, as the message says. CUDA reports late: an earlier kernel may be the cause."""


class UnsafeObjectError(CheckpointError):
    """An object is not plain data under torch's ``weights_only`` rules, so loading it could run code."""


class StagingBusyError(CheckpointError):
    """There is no free memory to stage another state.

    Either states that wait to be saved take all of it, and ``on_staging_busy="raise"``; or somebody keeps an earlier
    state that no save is going to write.
    """


class StagingFullError(CheckpointError, MemoryError):
    """A state is larger than the memory for staging. Nothing was copied. The message says how much the state needs."""


class RankError(CheckpointError):
    """Replaces an exception that cannot be sent between processes. The message holds its type and text."""


class RankLostError(CheckpointError):
    """A rank died, stopped or left the call while others waited for it. The previous checkpoint is whole.

    The process group cannot be used any more; the ranks that are left can make a new one.

    Attributes:
        ranks: What happened to each lost rank, as far as it is known, by rank in the process group.
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None, path: str = "") -> None:
        super().__init__(message, path)
        self.ranks = dict(ranks or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.ranks, self.path), self._state()


class SaveCancelledError(CheckpointError):
    """A save was cancelled before it was committed. The previous checkpoint is whole."""


class _FailedOnRanks(CheckpointError):
    def __init__(self, message: str, reasons: Mapping[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.reasons), self._state()


class SaveFailedError(_FailedOnRanks):
    """A save failed on some ranks and was undone, or the message says what is left. The previous checkpoint is whole.

    Attributes:
        reasons: The exception of each rank that failed, by rank.
    """


class LoadFailedError(_FailedOnRanks):
    """A load failed on some ranks, for several reasons or one that is no ``CheckpointError``. The state is undefined.

    Attributes:
        reasons: The exception of each rank that failed, by rank.
    """


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
    """Returns the exception for a ``base::Status``. The extension modules call it."""
    return _CLASSES[code](message, path, sys_errno)


# An exception is sent to all ranks. One that takes more bytes than this is sent as a shortened text.
_MAX_SENT_BYTES = 4 << 20
_MAX_TEXT_CHARS = 16 << 10


def sendable(error: BaseException) -> BaseException:
    """Returns ``error`` if another process can unpickle and print it and it is not huge; otherwise a RankError."""
    _, is_whole = _text_of(error)
    try:
        # One of our own may be longer, because it may already hold the shortened texts of several ranks.
        pickled = pickle.dumps(error) if is_whole or isinstance(error, CheckpointError) else b""
        if 0 < len(pickled) <= _MAX_SENT_BYTES and type(pickle.loads(pickled)) is type(error):
            return error
    except BaseException:  # whatever was raised, other ranks wait for the answer
        pass
    return RankError(name_and_text(error))


_RAISED_ON = "raised on host "


def note_host(error: BaseException, host: str) -> None:
    """Notes on which host ``error`` was raised, unless it says so already, or is about ranks that it names itself."""
    if not host_of(error) and not isinstance(error, (_FailedOnRanks, RankLostError, OutOfStepError)):
        error.add_note(f"{_RAISED_ON}{host}")


def host_of(error: BaseException) -> str:
    """Returns the host on which ``error`` was raised, as ``note_host`` noted it; "" if it was raised on this one."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED_ON)]
    return notes[0][len(_RAISED_ON) :] if notes else ""


def texts_of_ranks(failures: Mapping[int, BaseException]) -> str:
    """Returns the errors of ranks as one text, each with the rank, and with its host if that is another one."""
    hosts = {rank: f" on {host}" if (host := host_of(error)) else "" for rank, error in failures.items()}
    return "; ".join(
        f"rank {rank}{hosts[rank]}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items())
    )


def name_and_text(error: BaseException) -> str:
    """Returns the class and the text of an error, the text cut if it is long."""
    return f"{type(error).__module__}.{type(error).__qualname__}: {_text_of(error)[0]}"


def _text_of(error: BaseException) -> tuple[str, bool]:
    """Returns the text of ``error``, and whether the text is complete."""
    try:
        text = str(error)
    except BaseException as of_text:
        return f"(its text is not known: its __str__ raises {type(of_text).__qualname__})", False
    if len(text) <= _MAX_TEXT_CHARS:
        return text, True
    return f"{text[:_MAX_TEXT_CHARS]}... (cut: {len(text)} characters)", False
