# SPDX-License-Identifier: Apache-2.0
"""Where a process runs: its machine, for messages and to tell whether two processes can see each other."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bytecheckpoint.runtime.boot_id import boot_id
from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["Place", "name_own_address", "own_place"]


@dataclass(frozen=True)
class Place:
    """Where a process runs.

    Attributes:
        host: Name of the host. Several may have the same.
        address: Address at which other machines reach the process; "" if it is not known, or if all are on one machine.
        processes: The same for processes that see each other in ``/proc``: those of one machine and one PID namespace.
            "" if the system does not tell.
    """

    host: str
    address: str = ""
    processes: str = ""

    def __str__(self) -> str:
        return f"{self.host}, {self.address}" if self.address and self.address != self.host else self.host

    def is_with(self, other: Place) -> bool:
        """Whether processes at both places see each other in ``/proc``."""
        return bool(self.processes) and self.processes == other.processes


def own_place() -> Place:
    """Returns where this process runs."""
    return _own.get()[0]


def name_own_address(address: str) -> None:
    """Notes the address at which other machines reach this process."""
    own = _own.get()
    own[0] = replace(own[0], address=address)


def _find() -> list[Place]:
    host, processes = os.uname().nodename, ""
    with suppress(OSError):
        # Copies of one virtual machine may have the same boot id; containers of one machine have different namespaces.
        processes = f"{boot_id()} {Path('/proc/self/ns/pid').stat().st_ino} {host}"
    return [Place(host, "", processes)]


_own = PerProcess(_find)
