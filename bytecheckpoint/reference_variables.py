# SPDX-License-Identifier: Apache-2.0
"""Environment variables of ByteCheckpoint, the reference: what each of them means here, or why it is refused.

Two of them, ``BYTECHECKPOINT_ENABLE_TREE_TOPO`` and ``BYTECHECKPOINT_PLANNER_CACHE_CAPACITY``, have the names of fields
of ``Config`` and are read as these fields. Where another one means the same setting as the variable of a field, the
variable of the field wins: somebody set it for this package, the other one perhaps for a whole cluster.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.near_names import did_you_mean

__all__ = ["KNOWN", "LOGGING_LEVEL", "ROLE_SUFFIX", "fields_of", "merge_threads", "set_logging_level"]

_PREFIX = "BYTECHECKPOINT_"

ROLE_SUFFIX = _PREFIX + "ROLE_SUFFIX"
LOGGING_LEVEL = _PREFIX + "LOGGING_LEVEL"
_STORE_WORKER_COUNT = _PREFIX + "STORE_WORKER_COUNT"
_LOAD_WORKER_COUNT = _PREFIX + "LOAD_WORKER_COUNT"
_WRITE_CKPT_TIMEOUT = _PREFIX + "WRITE_CKPT_TIMEOUT"
_MERGE_NUM_IO_WORKER = _PREFIX + "MERGE_NUM_IO_WORKER"
# These are read where they are needed; see checkpoint/roles.py and the functions below.
_READ_ELSEWHERE = frozenset({ROLE_SUFFIX, LOGGING_LEVEL, _MERGE_NUM_IO_WORKER})
# Variables that are numbers, and the fields of Config that they set.
_NUMBERS = {
    _STORE_WORKER_COUNT: "io_threads",
    _LOAD_WORKER_COUNT: "load_io_threads",
    _WRITE_CKPT_TIMEOUT: "commit_deadline_s",
}
_MAX_THREADS = 16  # the maximum of Config.io_threads
# For each variable, the only value that can be honoured, and why no other one can.
_FIXED = {
    _PREFIX + "STORE_USE_THREAD_IO_WORKER": (
        "1",
        "files are written by threads without the GIL, and forked writers would not be faster; unset it. A save in a "
        "process of its own is dcp.async_save(async_checkpointer_type=AsyncCheckpointerType.PROCESS)",
    ),
    _PREFIX + "ENABLE_PINNED_MEM_D2H": (
        "1",
        "copies from devices always go to page-locked memory where the system gives it; unset it, and bound that "
        "memory with BYTECHECKPOINT_STAGING_BYTES",
    ),
}


# All that are understood.
KNOWN = frozenset({*_NUMBERS, *_FIXED, *_READ_ELSEWHERE})


def fields_of(environ: Mapping[str, str]) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the fields of ``Config`` that the reference's variables set, and the variables that it understood.

    The values are still texts, but they have been checked to be numbers in range.

    Raises:
        ConfigError: The value of a variable cannot be honoured. The message says why, and what to do.
    """
    texts: dict[str, str] = {}
    for variable, field in _NUMBERS.items():
        if variable in environ:
            texts[field] = _number(variable, environ[variable])
    for variable, (accepted, why) in _FIXED.items():
        if variable in environ and environ[variable].strip() != accepted:
            raise ConfigError(f"{variable}={environ[variable]!r} is not supported: {why}")
    if LOGGING_LEVEL in environ:
        _level(environ[LOGGING_LEVEL])
    merge_threads(environ)
    return texts, frozenset(variable for variable in environ if variable in KNOWN)


def set_logging_level(environ: Mapping[str, str] | None = None) -> None:
    """Gives the logger ``bytecheckpoint`` the level of BYTECHECKPOINT_LOGGING_LEVEL, if that is set.

    It adds no handler: the application decides where the log goes.

    Raises:
        ConfigError: The value is not a logging level.
    """
    text = (os.environ if environ is None else environ).get(LOGGING_LEVEL)
    if text is not None:
        logging.getLogger("bytecheckpoint").setLevel(_level(text))


def merge_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Returns BYTECHECKPOINT_MERGE_NUM_IO_WORKER, the number of threads that read when a checkpoint is merged.

    It returns None if the variable is not set.

    Raises:
        ConfigError: The value is not a number of threads from 1 to 16.
    """
    text = (os.environ if environ is None else environ).get(_MERGE_NUM_IO_WORKER)
    if text is None:
        return None
    if not (text.strip().isdecimal() and 1 <= int(text) <= _MAX_THREADS):
        raise ConfigError(f"{_MERGE_NUM_IO_WORKER}={text!r}: must be a number of threads from 1 to {_MAX_THREADS}")
    return int(text)


def _number(variable: str, text: str) -> str:
    if variable == _WRITE_CKPT_TIMEOUT:
        try:
            is_valid = float(text) > 0
        except ValueError:
            is_valid = False
        wanted = "a number of seconds > 0"
    else:
        is_valid = text.strip().isdecimal() and 1 <= int(text) <= _MAX_THREADS
        wanted = f"a number of threads from 1 to {_MAX_THREADS}"
    if not is_valid:
        raise ConfigError(f"{variable}={text!r}: must be {wanted}; it sets Config.{_NUMBERS[variable]}")
    return text.strip()


def _level(text: str) -> int:
    levels = logging.getLevelNamesMapping()
    name = text.strip().upper()
    if name.isdecimal():
        return int(name)
    if name not in levels:
        raise ConfigError(
            f"{LOGGING_LEVEL}={text!r}: must be one of {', '.join(levels)}, or a number{did_you_mean(name, levels)}"
        )
    return levels[name]
