# SPDX-License-Identifier: Apache-2.0
"""Explains what is at a path where a user looked for a checkpoint and there is none. Needs no torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bytecheckpoint.contents.foreign_formats import HEAD_BYTES, folder_format, foreign_file, other_writer
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.names import RECORDS, is_data, is_mark
from bytecheckpoint.storage.parts import REFERENCE, checkpoints_in, inspect_step, is_bare
from bytecheckpoint.storage.paths import Place, as_place, below, location, name_of, parent_of
from bytecheckpoint.storage.step_folder import step_paths, steps_there

__all__ = ["explaining", "refuse_reference"]

_MOST_NAMED = 20
_MOST_NAMES = 5  # of what is in a folder
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_HEAD_BYTES = 16  # that are shown


@contextmanager
def explaining(path: str | os.PathLike[str]) -> Iterator[None]:
    """If the ``with`` block finds no checkpoint at ``path``, adds to the error what is there, and what to call."""
    try:
        yield
    except CheckpointError as error:
        explained = _explained(error, path)
        if explained is error:
            raise
        raise explained from error


def _explained(error: CheckpointError, path: str | os.PathLike[str]) -> CheckpointError:
    if not isinstance(error, CheckpointNotFoundError):
        return error
    instead = ""
    try:
        refuse_reference(path, "open")
        for look in (_parts_at, _folder_at, _steps_at, _file_at, _names_at):
            with suppress(CheckpointError):  # the folder does not exist, or cannot be looked at
                instead = instead or look(path)
    except UnsupportedError as of_reference:
        return of_reference
    return CheckpointNotFoundError(f"open({path}): {instead}", os.fspath(path)) if instead else error


def refuse_reference(path: str | os.PathLike[str], operation: str) -> None:
    """Refuses a folder that ByteCheckpoint 0.0.2 or 0.0.3 wrote.

    It has no effect if ``path`` does not exist or cannot be looked at.

    Raises:
        UnsupportedError: ``path`` is a step folder, or a run folder, of ByteCheckpoint 0.0.2 or 0.0.3.
    """
    is_theirs = False
    with suppress(CheckpointError):
        folders = [os.fspath(path), *(step for _, step in step_paths(path)[-1:])]
        is_theirs = any(inspect_step(folder)["reason"] == REFERENCE for folder in folders)
    if is_theirs:
        raise UnsupportedError(f"{operation}({path}): {REFERENCE}", os.fspath(path))


def _file_at(path: str | os.PathLike[str]) -> str:
    """Returns what is wrong with a file, or an object of a store, that is no checkpoint; "" if it is none of both."""
    place = known(location(path))
    name, folder = name_of(place), folder_at(place)
    if isinstance(place, Path):
        size, head = _size_and_head(place)
    else:
        of_object = folder_at(parent_of(place)).file(name) if folder.has_listing else None
        size, head = (-1 if of_object is None else of_object.num_bytes), b""
    if size < 0:
        return ""
    if size == 0:
        return "the file is empty (0 bytes)"
    if is_mark(name) or is_data(name):
        return f"it is a file of a checkpoint: pass the folder of it, as '{parent_of(place)}'"
    num_bytes = "1 byte" if size == 1 else f"{size:,} bytes"
    foreign = foreign_file(place, head)
    if foreign:
        return foreign
    begin = f", and it begins with {head[:_HEAD_BYTES]!r}" if head else ""
    return (
        f"it is a file of {num_bytes} that is no checkpoint: neither of torch.save nor safetensors{begin}; a "
        "checkpoint of DCP is a folder"
    )


def _size_and_head(path: Path) -> tuple[int, bytes]:
    """Returns size and first bytes of a regular file; a size of -1 if it is none, or cannot be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            return -1, b""
        with path.open("rb") as file:
            return status.st_size, file.read(HEAD_BYTES)
    except OSError:
        return -1, b""


def _folder_at(path: str | os.PathLike[str]) -> str:
    """Returns what a folder of another library is, and what helps, if not all of it, what is in it."""
    place = known(location(path))
    found = folder_format(place)
    if not found:
        return ""
    names = sorted(folder_at(place).names())[:_MOST_NAMED]
    within = _first_that_opens(place, names)
    if within:
        return f"it is {other_writer(place)}: pass '{_joined(path, within)}', which is a checkpoint that is read"
    of_folders = ((name, folder_format(below(place, name))) for name in names)
    name, of_one = next(((name, of_one) for name, of_one in of_folders if of_one not in ("", found)), ("", ""))
    return f"it is {other_writer(place)}; of '{_joined(path, name)}': {of_one}" if name else found


def _parts_at(path: str | os.PathLike[str]) -> str:
    found = inspect_step(path)
    if found["components"]:
        parts = list(found["components"])
        return (
            f"it holds the {_listed('part', parts)} of bytecheckpoint.save: load them by bytecheckpoint.load('{path}', "
            f"...), or one by load_state_dict or BcpReader, as '{_joined(path, parts[-1])}'"
        )
    within = checkpoints_in(path)
    return f"it holds the {_listed('checkpoint', within)}: pass '{_joined(path, within[-1])}'" if within else ""


def _names_at(path: str | os.PathLike[str]) -> str:
    """Returns what a folder holds that has nothing known in it; "" if there is no folder."""
    place = known(location(path))
    folder = folder_at(place)
    names = sorted(name for name in folder.names() if name != RECORDS) if folder.is_there() else []
    if not names:
        return ""
    files = [name for name in names if name.endswith(_WEIGHTS)]
    one = f"; pass one of its files, as '{_joined(path, files[0])}'" if files else ""
    within = _first_that_opens(place, names[:_MOST_NAMED])
    if within:
        one = f"; pass '{_joined(path, within)}', which is one"
    return f"no checkpoint there: the folder holds {listed(names, _MOST_NAMES)}{one}"


def _first_that_opens(place: Place, names: Iterable[str]) -> str:
    return next((name for name in names if _opens(below(place, name))), "")


def _opens(place: Place) -> bool:
    """Whether a folder in the folder is a checkpoint, as that of an actor in a step of verl."""
    with suppress(CheckpointError):
        return folder_at(place).is_there() and bool(_core.Checkpoint.open(str(place)).names())
    return False


def _joined(path: str | os.PathLike[str], name: str) -> str:
    return os.path.join(path, name)  # noqa: PTH118  # a URL, too


def _steps_at(path: str | os.PathLike[str]) -> str:
    steps = steps_there(path)
    if not steps:
        return ""
    numbers = [str(step) for step, _ in steps]
    run = f"it is a run folder with the {_listed('step', numbers)}"
    newest = next((path for _, path in reversed(steps) if folder_at(path).names()), "")  # that is not empty
    if not newest:
        return f"{run}, and nothing is in them"
    if _opens(as_place(newest)) and is_bare(inspect_step(newest)):  # of a library whose steps `latest` does not know
        return f"{run}: pass the folder of one, as '{newest}'"
    of_newest = _folder_at(newest)
    if of_newest:
        return f"{run}; of '{newest}': {of_newest}"
    return f"{run}: pass the folder of one, as '{newest}', or what bytecheckpoint.latest('{path}') gives"


def _listed(noun: str, names: list[str]) -> str:
    more = f"{len(names) - _MOST_NAMED} more and " if len(names) > _MOST_NAMED else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {more}{', '.join(names[-_MOST_NAMED:])}"
