# SPDX-License-Identifier: Apache-2.0
"""What the launcher of a job says about its ranks, and the refusal of a rank that does not know of the others."""

from __future__ import annotations

import os

import torch.distributed as dist

from bytecheckpoint.errors import ConfigError

__all__ = ["is_unaware", "refuse_unaware_rank"]


def refuse_unaware_rank(what: str, path: str) -> None:
    """Refuses a call of a rank that would act as if it were alone, although a launcher has started several.

    Launchers such as torchrun set ``WORLD_SIZE``. If nobody has made a process group, each rank would save to the same
    path as if it were the only one, and what one of them saved would be all that is left. Call it only for a rank that
    was not told to act alone.

    Args:
        what: What is being done, for the error.
        path: Path of it, for the error.

    Raises:
        ConfigError: ``WORLD_SIZE`` is greater than 1, and there is no process group.
    """
    if not is_unaware():
        return
    size, rank = _number("WORLD_SIZE"), _number("RANK")
    which = f"this process is one of {size} ranks" if rank is None else f"this process is rank {rank} of {size}"
    raise ConfigError(
        f"{what}({path}): {which}, as WORLD_SIZE in its environment says, but it has no process group, so the ranks do "
        "not know of each other, and each would act as if it were alone. Call torch.distributed.init_process_group() "
        "on every rank first. If this process is to act alone, on a path of its own, pass no_dist=True, or remove "
        "WORLD_SIZE from its environment where a call has no such argument",
        path,
    )


def is_unaware() -> bool:
    """Whether a launcher has started several ranks, and nobody has made a process group in this one."""
    size = _number("WORLD_SIZE")
    return size is not None and size >= 2 and not (dist.is_available() and dist.is_initialized())


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
