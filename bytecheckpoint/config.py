# SPDX-License-Identifier: Apache-2.0
"""Settings, as one frozen value that is handed in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_type_hints

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.reference_variables import fields_of

__all__ = ["Config"]

_PREFIX = "BYTECHECKPOINT_"
_MIB = 1 << 20
_CHOICES = {
    "shared_reading": ("auto", "cooperative", "independent"),
    "on_staging_busy": ("wait", "raise", "double_buffer"),
    "unsafe_objects": ("warn", "error", "allow"),
}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a writer or a reader.

    ``config=None`` anywhere means ``Config.from_env()`` at the time the object is made.

    Attributes:
        ring_bytes: Host memory that a save or a load adds to the process: slots of 8 MiB that are filled and written
            at the same time. 16 MiB to 256 MiB.
        io_threads: Threads that write or read, 1 to 16. Two keep a single disk busy between requests.
        load_io_threads: Those that read in a load, 1 to 16. 0: as ``io_threads`` says.
        niceness: Added to that of the threads that copy and write a save, 0 to 19: training goes before them.
        write_bytes_per_s: Most that a rank writes of a save in a second, so that it takes less from training and from
            others at the same storage. 0: as fast as it can; else 1 MiB at least.
        direct_io: Use O_DIRECT where the file system has it. Off: everything goes through the page cache.
        verify: Check the CRC of every block that is read. Trailers of files are always checked.
        commit_deadline_s: Seconds after which a save that has not finished loses its right to commit, so that a save
            that is stuck cannot block its path.
        io_timeout_s: Seconds after which storage that does not answer to a call is given up: the save or the load fails
            on all ranks with a ``StorageError`` whose ``errno`` is ``ETIMEDOUT``. It counts for each call by itself, so
            slow storage works. 0: never.
        take_over: Begin even if another save holds the path; that save can then no longer commit.
        allow_partial_tensors: Save tensors of which the ranks of the save hold but parts, and mark them as partial on
            purpose. Off: such a save is refused, and nothing is committed. Give it to planner and writer alike. Saves
            with ``use_collectives=False`` do not need it: what counts there is what the parts of all ranks hold.
        accept_rewritten_metadata: Read a checkpoint of ours whose ``.metadata`` another tool has written anew. Blocks
            are still checked; that files belong together is then only what that tool says.
        shared_reading: What ranks do that want the same bytes. ``independent``: each reads for itself. ``cooperative``:
            each byte is read by one of them, and sent to the others. ``auto``: as the README says. If ranks differ,
            ``independent`` goes before ``cooperative``, and that before ``auto``.
        enable_tree_topo: Let the plans of many ranks travel up and down a tree, instead of all to one rank. Where ranks
            rely on a kept plan that the coordinator has lost, they do so in any case.
        tree_topo_threshold: Number of ranks above which they do.
        tree_topo_fan_out: Ranks that hand their plans to one, 2 to 1024.
        planner_cache_capacity: Plans, and answers to them, that a process keeps, 1 to 1024.
        allow_pickle: Hand objects to the planner that torch's ``weights_only`` rules refuse. Loading may then run code.
        unsafe_objects: What a save does with an object that will not load without ``allow_pickle``. ``warn``: one
            warning a save, on the coordinator, that names keys and types; none if ``allow_pickle`` is set here, too.
            ``error``: an ``UnsafeObjectError`` on every rank, before anything is written. ``allow``: nothing.
        staging_bytes: Most that one state may take in host memory while ``async_save`` saves it; made ready ahead of
            time. 0: what the states take, as far as the system has memory left.
        overlap_staging: A writer that is its own stager, and the stager of ``register``, return a future of the staged
            state, so that ``async_save`` gives an ``AsyncSaveResponse``: see ``BcpStager``.
        staging_threads: Threads that copy a state, 1 to 64.
        on_staging_busy: What the next ``async_save`` does while the state before is still being saved. ``wait``: until
            there is room for its own. ``raise``: a ``StagingBusyError``. ``double_buffer``: it has memory of its own;
            the one after that waits.
        handle_sigterm: SIGTERM waits for background saves, then does what it did before. From the first background save
            that is begun in the main thread.
        exit_timeout_s: Seconds for which the end of the process, or SIGTERM with ``handle_sigterm``, waits for a
            background save; one that has not ended then is given up: 0 to 86400. Python itself waits, without end, for
            saves that plain ``dcp.async_save`` runs without ``register``.
        stall_timeout_s: Seconds without a sign of life after which ``save_state_dict``, ``async_save_state_dict`` and
            ``load_state_dict`` give a rank up that others wait for, for groups that they make: 1 to 86400. See
            ``new_group``.
        progress: Show a bar of the bytes that the coordinator has written or read, on stderr.

    Raises:
        ConfigError: A value out of range.
    """

    ring_bytes: int = 24 * _MIB
    io_threads: int = 2
    load_io_threads: int = 0
    niceness: int = 0
    write_bytes_per_s: int = 0
    direct_io: bool = True
    verify: bool = True
    commit_deadline_s: float = 3600.0
    io_timeout_s: float = 1800.0
    take_over: bool = False
    allow_partial_tensors: bool = False
    accept_rewritten_metadata: bool = False
    enable_tree_topo: bool = True
    tree_topo_threshold: int = 64
    tree_topo_fan_out: int = 16
    planner_cache_capacity: int = 8
    allow_pickle: bool = False
    unsafe_objects: str = "warn"
    shared_reading: str = "auto"
    staging_bytes: int = 0
    overlap_staging: bool = False
    staging_threads: int = 2
    on_staging_busy: str = "wait"
    handle_sigterm: bool = False
    exit_timeout_s: float = 1800.0
    stall_timeout_s: float = 60.0
    progress: bool = False

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ConfigError(f"Config({name}={value!r}): {kind.__name__} wanted")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"Config({name}={getattr(self, name)!r}): one of {', '.join(choices)} wanted")
        self._check("ring_bytes", 16 * _MIB, 256 * _MIB)
        self._check("io_threads", 1, 16)
        self._check("load_io_threads", 0, 16)
        self._check("niceness", 0, 19)
        if self.write_bytes_per_s != 0:
            self._check("write_bytes_per_s", _MIB, float("inf"))
        self._check("commit_deadline_s", 0.0, float("inf"))
        self._check("io_timeout_s", 0.0, float("inf"))
        self._check("tree_topo_threshold", 1, float("inf"))
        self._check("tree_topo_fan_out", 2, 1024)
        self._check("planner_cache_capacity", 1, 1024)
        self._check("staging_bytes", 0, float("inf"))
        self._check("staging_threads", 1, 64)
        self._check("exit_timeout_s", 0, 86400)
        self._check("stall_timeout_s", 1, 86400)

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"Config({name}={value!r}): a number from {low} to {high} wanted")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads ``BYTECHECKPOINT_<FIELD>`` variables, for example ``BYTECHECKPOINT_RING_BYTES=134217728``.

        Those of ByteCheckpoint, the reference, are read as ``reference_variables`` says; a variable of a field goes
        before one of those that means the same.

        Args:
            environ: Instead of ``os.environ``.

        Raises:
            ConfigError: A variable of that prefix names no field, or its value is not of the field's type; one of the
                reference asks for what there is not here.
        """
        environ = os.environ if environ is None else environ
        kinds = get_type_hints(cls)
        fields = {_PREFIX + field.name.upper(): field.name for field in dataclasses.fields(cls)}
        of_reference, understood = fields_of(environ)
        values: dict[str, bool | int | float | str] = {
            field: _parse(field, text, kinds[field]) for field, text in of_reference.items()
        }
        if "io_threads" in of_reference and _PREFIX + "IO_THREADS" not in environ:  # it is of saves alone
            values.setdefault("load_io_threads", cls.io_threads)
        for variable, text in environ.items():
            if not variable.startswith(_PREFIX) or variable in understood:
                continue
            if variable not in fields:
                raise ConfigError(f"{variable}: no such setting; known are {', '.join(sorted(fields))}")
            values[fields[variable]] = _parse(variable, text, kinds[fields[variable]])
        return cls(**values)  # type: ignore[arg-type]


def _parse(variable: str, text: str, kind: type) -> bool | int | float | str:
    if kind is str:
        return text.strip().lower()
    try:
        if kind is bool:
            return _WORDS[text.strip().lower()]
        return int(text) if kind is int else float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{variable}={text!r}: a {kind.__name__} wanted") from None
