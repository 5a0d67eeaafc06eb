# SPDX-License-Identifier: Apache-2.0
"""Explains what is at a path where a user looked for a checkpoint and there is none. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError
from bytecheckpoint.storage.parts import REFERENCE, checkpoints_in, inspect_step
from bytecheckpoint.storage.step_folder import step_paths, steps_there

__all__ = ["explaining", "refuse_reference"]

_MOST_NAMED = 20


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
        with suppress(CheckpointError):  # the folder does not exist, or cannot be looked at
            instead = _parts_at(path) or _steps_at(path)
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


def _joined(path: str | os.PathLike[str], name: str) -> str:
    return os.path.join(path, name)  # noqa: PTH118  # a URL, too


def _steps_at(path: str | os.PathLike[str]) -> str:
    steps = steps_there(path)
    if not steps:
        return ""
    numbers = [str(step) for step, _ in steps]
    return (
        f"it is a run folder with the {_listed('step', numbers)}: pass the folder of one, as '{steps[-1][1]}', or what "
        f"bytecheckpoint.latest('{path}') gives"
    )


def _listed(noun: str, names: list[str]) -> str:
    more = f"{len(names) - _MOST_NAMED} more and " if len(names) > _MOST_NAMED else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {more}{', '.join(names[-_MOST_NAMED:])}"
