# SPDX-License-Identifier: Apache-2.0
"""Metadata that could not be read, on their way to a hook that can raise the error on every rank."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["FailedMetadata", "typed"]


class FailedMetadata(Metadata):
    """Carries the error of ``read_metadata`` until a later hook can raise it on every rank.

    DCP does not let ``read_metadata`` fail: it logs the exception with its traceback, then asks for the metadata of one
    rank, and turns an exception of that call into an AssertionError.
    """

    def __init__(self, error: CheckpointError) -> None:
        self.__dict__["error"] = error

    def __bool__(self) -> bool:
        # If this is False, DCP asks for the metadata of one rank. It must not do so if `.metadata` exists: then the
        # error of reading that file is the one to raise.
        return not isinstance(self.__dict__["error"], CheckpointNotFoundError)

    def raise_it(self) -> NoReturn:
        """Raises the error."""
        raise self.__dict__["error"]

    # Properties, because a default of a dataclass field is a class attribute, so `__getattr__` would not be called.
    state_dict_metadata = property(raise_it)
    planner_data = property(raise_it)
    storage_data = property(raise_it)
    storage_meta = property(raise_it)
    version = property(raise_it)


def typed(error: Exception) -> CheckpointError:
    """Returns ``error``, or an error of ours that says the same."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the metadata cannot be used: {type(error).__name__}: {error}")
