# SPDX-License-Identifier: Apache-2.0
"""The paths and URLs of checkpoints, as users pass them and as we keep them. Nothing is looked at."""

from __future__ import annotations

import os
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, StorageError
from bytecheckpoint.storage.object_store.urls import is_known_store, is_store_url, joined, store_url

__all__ = [
    "Place",
    "TieredPath",
    "absolute",
    "as_place",
    "below",
    "can_be_place",
    "check_name",
    "is_local",
    "is_url",
    "local_path",
    "location",
    "location_to_read",
    "name_of",
    "parent_of",
    "path_to_read",
    "real",
    "working_directory",
]

# A directory, or a URL as ``store_url`` returns it.
Place = Path | str

_FILE_URL = "file://"


class TieredPath(os.PathLike[str]):
    """A path that is in several places, which ``Tiers`` makes: the nearest comes first."""

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where a save is that is done: on the nearest disk; in memory, or in a store, if there is no disk."""

    @property
    @abstractmethod
    def places(self) -> tuple[Place, ...]:
        """Where it is, or will be, the nearest place first."""

    @abstractmethod
    def open(self) -> None:
        """Makes its places known, with their settings."""

    @abstractmethod
    def place_to_write(self) -> Place:
        """Returns ``place``, for a save. What is committed there goes on to the others."""

    @abstractmethod
    def place_to_read(self) -> Place:
        """Returns the nearest place that has its newest save; ``place`` if none has one."""

    def __fspath__(self) -> str:
        return str(self.place)

    def __str__(self) -> str:
        return str(self.place)


_MOST_SHOWN = 80


def as_place(text: str | os.PathLike[str]) -> Place:
    """Returns the place that was kept as text."""
    return str(text) if is_store_url(text) else Path(text)


def below(place: Place, *names: str) -> Place:
    """Returns the place that ``names`` lead to from ``place``."""
    return Path(place, *names) if isinstance(place, Path) else joined(place, *names)


def name_of(place: Place) -> str:
    """Returns the last name in a path or URL."""
    return place.name if isinstance(place, Path) else place.rpartition("/")[2]


def parent_of(place: Place) -> Place:
    """Returns the folder that ``place`` is in; above a bucket there is none, and it is its own."""
    if isinstance(place, Path):
        return place.parent
    above = place.rpartition("/")[0]
    return place if above.endswith("/") else above


def absolute(place: str | os.PathLike[str]) -> str:
    """Returns a place as text that stays right if the process changes its working directory.

    It is not normalized: what ``..`` leads to is known only when links are followed. The directory may be gone.
    """
    return os.fspath(place) if is_store_url(place) else str(Path(place).absolute())


def real(place: str | os.PathLike[str]) -> str:
    """Returns a place as text, without symbolic links."""
    return os.fspath(place) if is_store_url(place) else os.path.realpath(place)


def check_name(path: str) -> None:
    """Refuses the path of a folder that was listed if its name is not text.

    Raises:
        ConfigError: It is not.
    """
    location(path if is_store_url(path) else os.path.join(".", path))  # noqa: PTH118


def can_be_place(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names a directory of this machine, or is a URL of a store that obstore can read."""
    return is_local(path) or is_known_store(path)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL of any scheme, ``file`` included."""
    return not isinstance(path, os.PathLike) and "://" in str(path)


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` names a directory of this machine: a path, or a ``file`` URL."""
    return not is_url(path) or str(path)[: len(_FILE_URL)].lower() == _FILE_URL


def working_directory() -> Path | None:
    """Returns the working directory of the process; None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def local_path(path: str | os.PathLike[str], directory: Path | None = None) -> Path:
    """Returns the directory that ``path`` names, as an absolute path.

    The path must be absolute because the process may change its working directory before the path is used. Symbolic
    links and ``..`` stay in it. ``~`` and ``~user`` at its beginning are expanded, and ``file:///run`` and
    ``file://localhost/run`` are ``/run``. Any other URL is refused: as a path it would silently become a directory of
    that name.

    Args:
        path: A path or a ``file`` URL.
        directory: Directory to which a relative path is relative; None takes the working directory.

    Raises:
        StorageError: The path is relative, and the working directory was removed.
        ConfigError: It does not name a directory of this machine. For a URL the message says only the scheme, because
            the rest may contain secrets.
    """
    if not isinstance(path, str | os.PathLike):
        what = f"got a {type(path).__name__}"
        if isinstance(path, Mapping):
            what += ": our calls take the path first, then the state"
        raise ConfigError(f"{reprlib.repr(path)[:_MOST_SHOWN]}: must be the path of a directory, {what}")
    if not is_local(path):
        scheme = str(path).partition("://")[0]
        raise ConfigError(
            f"{scheme}://...: must be a directory, not a URL; pass the path where it is mounted, or leave the URL to "
            "DCP's own FsspecWriter and FsspecReader"
        )
    text = _path_of_url(str(path)) if is_url(path) else os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{text!r}: must be the path of a directory; '.' is the working directory")
    if "\0" in text or not _is_utf8(text):
        raise ConfigError(f"{text!r}: must be a path of UTF-8 text without zero bytes")
    try:
        named = Path(text).expanduser() if text.startswith("~") and not is_url(path) else Path(text)
    except RuntimeError as error:
        raise ConfigError(f"{text!r}: {error}; for a directory with exactly this name pass './{text}'") from error
    if named.is_absolute():
        return named
    directory = directory or working_directory()
    if directory is None:
        raise StorageError(f"{text!r}: the path is relative, but the working directory was removed", text)
    return directory / named


def location(path: str | os.PathLike[str], directory: Path | None = None) -> Path | str:
    """Returns the directory that ``path`` names as ``local_path`` does; for a URL of an object store, that URL.

    Of ``Tiers`` it is the place that saves write to.

    Raises:
        ConfigError: See ``local_path`` and ``store_url``.
        StorageError: See ``local_path``.
    """
    if isinstance(path, TieredPath):
        return path.place_to_write()
    return store_url(path) if is_store_url(path) else local_path(path, directory)


def location_to_read(path: str | os.PathLike[str] | None) -> Path | str:
    """Does what ``location`` does, for a checkpoint to read. None means that a run has no checkpoint.

    Of ``Tiers`` it is the nearest place that has the newest save of it.

    Raises:
        CheckpointNotFoundError: ``path`` is None.
        ConfigError: See ``location``.
        StorageError: See ``location``.
    """
    if isinstance(path, TieredPath):
        return path.place_to_read()
    return path_to_read(path) if path is None or not is_store_url(path) else store_url(path)


def path_to_read(path: str | os.PathLike[str] | None) -> Path:
    """Does what ``local_path`` does, for a checkpoint to read. None means that a run has no checkpoint.

    Raises:
        CheckpointNotFoundError: ``path`` is None.
        ConfigError: See ``local_path``.
        StorageError: See ``local_path``.
    """
    if path is None:
        raise CheckpointNotFoundError(
            "load(None): there is no checkpoint; latest and find_latest_ckpt_path return None if a run has none yet: "
            "begin without a load in that case"
        )
    return local_path(path)


def _path_of_url(url: str) -> str:
    host, slash, rest = url[len(_FILE_URL) :].partition("/")
    if host.lower() not in ("", "localhost") or not slash or "?" in rest or "#" in rest:
        raise ConfigError(
            "file://...: must be file:///absolute/path, without a host; write '?' and '#' in names as %3F and %23"
        )
    try:
        return "/" + unquote_to_bytes(rest).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"file://...: must be a path of UTF-8 text: {error}") from error


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
