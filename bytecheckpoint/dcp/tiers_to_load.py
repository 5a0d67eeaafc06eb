# SPDX-License-Identifier: Apache-2.0
"""What the machines of a group have of a run in tiers, made known to all of them before they load."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch.distributed as dist

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.memory_machines import Machines
from bytecheckpoint.dcp.near_disks import lend_to_load
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.storage.memory.connection import run_of
from bytecheckpoint.storage.memory.peers import meet
from bytecheckpoint.storage.tiers import Tiers, lend_near

__all__ = ["meet_to_load"]

_logger = logging.getLogger("bytecheckpoint")


def meet_to_load(tiers: object, group: dist.ProcessGroup | None, what: str, config: Config) -> bool:
    """Makes this machine know all that the machines of a group have of a run. Collective over ``group``.

    That is: what is in their memory, and on their disks at the near place, if each has one of its own there.

    Args:
        tiers: ``Tiers``, or the path of a step in them; of anything else, nothing is done.
        group: A group of our own; None for this rank alone.
        what: What is being done, for errors.
        config: Settings of the load.

    Returns:
        False if machines cannot reach one another, so that it is known of none what the others have in memory.

    Raises:
        ConfigError: An argument of the tier does not fit, and there is no other place.
        StorageError: Machines cannot reach one another, and there is no other place.
        CheckpointError: A rank was lost.
    """
    tiers = getattr(tiers, "tiers", tiers)
    if not isinstance(tiers, Tiers) or group is None or group.size() == 1:
        return True
    tiers.open()
    if tiers.near:
        try:
            lend_to_load(tiers, group, what, config)
        except StorageError as error:  # on all ranks
            if not tiers.durable:
                raise
            _logger.warning("%s(%s): not from the disks of several machines: %s", what, tiers.near, str(error))
            lend_near(tiers, "")
    return tiers.memory is None or _knows_memory(tiers, group, what, config)


def _knows_memory(tiers: Tiers, group: dist.ProcessGroup, what: str, config: Config) -> bool:
    assert tiers.memory is not None
    without_replicas = replace(tiers, memory=replace(tiers.memory, replicas=0))  # a smaller job can load
    call = what, tiers.in_memory
    try:
        Machines(without_replicas, group, call, config.stall_timeout_s, looks=True).adopt()
    except (ConfigError, StorageError) as error:  # on all ranks
        if not tiers.disks:
            raise
        _logger.warning("%s(%s): not from the memory of several machines: %s", *call, str(error))
        meet(run_of(tiers.in_memory), None)
        return False
    return True
