# SPDX-License-Identifier: Apache-2.0
"""Files by which subscribers say where they stand, so that no delta goes that one of them needs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place

__all__ = ["Registration", "Registrations", "check_subscriber"]

_PREFIX, _SUFFIX = "subscriber-", ".json"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Registration:
    """What a subscriber says.

    Attributes:
        version: The version that it stands at; None if it has none.
        reads: The version of a base that it is loading; None if it loads none.
        expires_s: Seconds after which it counts no more, unless it says so again.
    """

    version: int | None
    reads: int | None
    expires_s: float

    @property
    def oldest(self) -> int | None:
        """The oldest version that it may still read, or stands at; None if it needs nothing that is there."""
        return self.version if self.reads is None else self.reads - 1


_UNREADABLE = Registration(-1, None, 3600.0)


def check_subscriber(name: str) -> str:
    """Returns the name of a subscriber.

    Raises:
        ConfigError: It cannot be a part of the name of a file.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"Subscriber(name={name!r}): must be 1 to 80 letters, digits, '_', '.' or '-'")
    return name


class Registrations:
    """The subscribers of a place. Local. Methods raise ``StorageError`` where the storage refuses.

    Args:
        place: Folder, or its URL, of all versions.
    """

    def __init__(self, place: Place) -> None:
        self._folder = folder_at(place)

    def write(self, name: str, registration: Registration) -> None:
        """Registers a subscriber, or says that it is still there."""
        content = {
            "version": registration.version,
            "reads": registration.reads,
            "expires_s": registration.expires_s,
        }
        self._folder.write_file(_file_of(name), json.dumps(content).encode())

    def remove(self, name: str) -> None:
        """Removes a subscriber that needs nothing any more."""
        self._folder.remove_file(_file_of(name))

    def alive(self) -> list[Registration]:
        """Returns those that have not expired, by the clock of this machine and that of the storage.

        Files of those that expired are removed. One that cannot be read counts as one that needs everything,
        for an hour: whoever wrote it may be gone.
        """
        found = []
        for name, changed_ns in self._folder.file_times().items():
            if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
                continue
            content = self._folder.read_file(name, _MOST_BYTES)
            if content is None:
                continue  # it has just left
            registration = _parsed(content)
            if time.time() - changed_ns / 1e9 > registration.expires_s:
                self._folder.remove_file(name)
                continue
            found.append(registration)
        return found


def _file_of(name: str) -> str:
    return f"{_PREFIX}{name}{_SUFFIX}"


def _parsed(content: bytes) -> Registration:
    try:
        values = json.loads(content)
        version, reads, expires_s = values["version"], values["reads"], float(values["expires_s"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _UNREADABLE
    if not all(number is None or isinstance(number, int) for number in (version, reads)):
        return _UNREADABLE
    return Registration(version, reads, expires_s)
