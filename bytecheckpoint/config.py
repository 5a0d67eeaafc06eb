# SPDX-License-Identifier: Apache-2.0
"""The settings, as one frozen value that callers pass in."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.reference_variables import KNOWN, fields_of

__all__ = ["Config"]

T = TypeVar("T")

_PREFIX = "BYTECHECKPOINT_"
_MIB = 1 << 20
_CHOICES = {
    "shared_reading": ("auto", "cooperative", "independent"),
    "on_staging_busy": ("wait", "raise", "double_buffer"),
    "unsafe_objects": ("warn", "error", "allow"),
    "differing_copies": ("warn", "check", "trust"),
    "tensor_subclasses": ("parts", "opaque"),
    "planning": ("as given", "ours"),
    "trace": ("off", "summary", "full"),
}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class StorageOptions(Mapping[str, Any]):
    """Options of an object store, which may be secrets: text shows only their names, and a pickle holds none."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __hash__(self) -> int:
        return hash(frozenset(self._options))

    def __repr__(self) -> str:
        return f"<options {', '.join(sorted(self._options))}>" if self._options else "<no options>"

    def __reduce__(self) -> tuple[type[StorageOptions], tuple[()]]:
        return StorageOptions, ()


def _naming_the_nearest(cls: type[T]) -> type[T]:
    """Makes the error for an argument that the class does not have say which one is near."""
    made: Any = cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **settings: Any) -> None:
        for name in settings.keys() - cls.__annotations__.keys():
            near = did_you_mean(name, cls.__annotations__)
            raise TypeError(f"{cls.__name__}({name}=...): there is no such setting{near}")
        made(self, *args, **settings)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


@_naming_the_nearest
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a writer or a reader.

    Wherever ``config=None`` is passed, ``Config.from_env()`` is called when the object is made.

    Attributes:
        ring_bytes: Host memory that a save or a load adds to the process, 16 MiB to 256 MiB. It is divided into slots
            of 8 MiB, so that some slots are filled while others are written.
        io_threads: Number of threads that write or read, 1 to 16. Two threads keep a single disk busy between requests.
        load_io_threads: Number of threads that read in a load, 1 to 16. 0 takes ``io_threads``.
        niceness: Value added to the niceness of the threads that copy and write a save in the background, 0 to 19, so
            that training goes before them. They run as usual in a save that its caller waits for.
        write_bytes_per_s: Limit on the bytes that a rank writes per second in a save, so that training and other users
            of the storage are slowed down less. 0 means no limit; otherwise at least 1 MiB.
        direct_io: Whether to use O_DIRECT where the file system has it. Where it takes O_DIRECT and then refuses
            transfers, a save or load goes on through the page cache, and a warning says so once. If False, everything
            goes through the page cache.
        verify: Whether a load checks the CRC of every block that it reads. Trailers of files are always checked.
        commit_deadline_s: Seconds after which a save that has not finished loses its right to commit, so that a save
            that is stuck cannot block its path.
        io_timeout_s: Seconds to wait for the storage to answer one call. After that the save or the load fails on all
            ranks with a ``StorageError`` whose ``errno`` is ``ETIMEDOUT``. The time counts for each call by itself, so
            slow storage works. 0 waits without limit.
        visibility_timeout_s: Seconds to wait until files of other machines are seen, before one is called missing or
            cut. File systems of networks and in user space show them late. On a local file system nothing waits.
        take_over: Whether a save begins even if another save holds the path. The other save can then no longer commit.
        allow_partial_tensors: Whether to save tensors of which the ranks of the save hold only parts, and to mark them
            as intentionally partial. If False, such a save is refused, and nothing is committed. Pass it to planner
            and writer alike. Saves with ``use_collectives=False`` do not need it: for them the parts that all ranks
            hold together count.
        accept_rewritten_metadata: Whether to read a checkpoint of ours whose ``.metadata`` another tool has rewritten.
            Blocks are still checked, but that the files belong together then rests on that tool alone.
        shared_reading: How ranks that want the same bytes read them. ``independent``: each rank reads for itself.
            ``cooperative``: one rank reads each byte and sends it to the others. ``auto``: cooperative where it saves
            enough, by the rule in docs/planning_and_resharding.md. If the ranks differ, ``independent`` wins over
            ``cooperative``, and ``cooperative`` over ``auto``.
        enable_tree_topo: Whether the plans of many ranks travel up and down a tree of ranks, instead of all of them to
            one rank. The tree is used in any case where ranks rely on a kept plan that the coordinator has lost.
        tree_topo_threshold: Number of ranks above which plans travel through a tree.
        tree_topo_fan_out: Number of ranks that send their plans to one rank of the tree, 2 to 1024.
        planning: Who plans a call of DCP that has our writer or reader, and no planner or DCP's own, which nobody has
            touched. ``ours``: a ``BcpSavePlanner`` or ``BcpLoadPlanner``. ``as given``: the planner that it has.
        planner_cache_capacity: Number of plans, with the answers to them, that a process keeps, 1 to 1024.
        allow_pickle: Whether a load hands objects to the planner that torch's ``weights_only`` rules refuse. Loading
            may then run code.
        unsafe_objects: What a save does with an object that will not load without ``allow_pickle``. ``warn``: the
            coordinator gives one warning for each save, with keys and types, unless ``allow_pickle`` is set here, too.
            ``error``: every rank raises an ``UnsafeObjectError`` before anything is written. ``allow``: nothing.
        differing_copies: What a save does about an object or a plain tensor of which ranks hold different copies under
            one key. ``warn``: it stores the copy of the lowest rank, and the coordinator gives one warning for each
            key. ``check``: all ranks raise an ``InvalidPlanError`` that names keys and ranks, before anything is
            written. ``trust``: copies are not compared. Sharded tensors on device meshes that share no rank must be
            equal with ``warn``, too. Of large tensors a sample is compared; see docs/planning_and_resharding.md.
        tensor_subclasses: How a save stores tensors of subclasses that describe themselves by ``__tensor_flatten__``.
            ``parts``: as their plain tensors, below their key. ``opaque``: as stock DCP does, pickled.
        staging_bytes: Limit on the host memory that one state takes while ``async_save`` saves it. The memory is
            prepared ahead of time. 0 allows what the states need, as far as the system has memory left.
        overlap_staging: Whether a writer that is its own stager, and the stager of ``register``, return a future of the
            staged state, so that ``async_save`` returns an ``AsyncSaveResponse``. See ``BcpStager``.
        staging_threads: Number of threads that copy a state, 1 to 64.
        on_staging_busy: What the next ``async_save`` does while the previous state is still being saved. ``wait``: it
            waits until there is room for its own state. ``raise``: it raises a ``StagingBusyError``.
            ``double_buffer``: it has memory of its own, and the save after it waits.
        handle_sigterm: Whether SIGTERM waits for background saves before it does what it did before. This holds from
            the first background save that is begun in the main thread.
        exit_timeout_s: Seconds for which the end of the process, or SIGTERM with ``handle_sigterm``, waits for a
            background save, 0 to 86400. A save that has not ended by then is abandoned. Python itself waits without
            limit for saves that plain ``dcp.async_save`` runs without ``register``.
        failed_save_exit_code: Exit code of a process that ends by itself after a background save failed, or did not
            end, and nobody looked at its future or called ``shutdown``, 1 to 255. 0 leaves the exit code as it is, and
            only logs the failure. It counts for saves of our own entry points, and of ``register``.
        stall_timeout_s: Seconds without a sign of life after which ``save_state_dict``, ``async_save_state_dict`` and
            ``load_state_dict`` treat a rank that others wait for as lost, 1 to 86400. It applies to groups that these
            functions make. See ``new_group``. After the same time without progress, every save and load logs its phase
            and the rank that it waits for.
        digest: Whether a save stores its digest in the checkpoint. Before it commits, the coordinator reads back all
            that the ranks have written; see docs/digests.md.
        link_unchanged: Whether a save links the data files of the step before, in the same run folder,
            whose tensors have not changed since, instead of writing them again; see docs/unchanged_bytes.md. Needs the
            package xxhash.
        link_rewrite_every: With ``link_unchanged``, a file is written anew in each so manieth save in a row that could
            link it, so that damage to one file is not in all steps, at least 1.
        trace: What each rank records of what its threads do. ``summary``: enough for reports and the journal.
            ``full``: every piece of work, with 2 MiB of memory for each thread, and a file of each rank beside the
            journal. ``off``: nothing.
        journal: Where the coordinator writes a line for each save. ``auto``: to the folder ``.bcp`` in the folder of
            the checkpoint. ``off``: nowhere. Else a folder, which is made if its parent exists; loads write there, too.
        journal_hosts: Whether the journal has the names of machines. If False, it numbers them.
        slow_factor: A save or a load that takes more than so many times as long as the ten before it (their median)
            logs a warning that names the rank and the phase. 0 logs none.
        progress: Whether the coordinator shows a progress bar on stderr, or in a notebook: bytes that it has written or
            read, phase, time left, and which rank of this machine is furthest behind.
        storage_options: Options of an object store, for paths that are URLs: the names that obstore gives them, such as
            ``endpoint``, ``region`` or ``access_key_id``, and ``client_options``. Other options come from the variables
            of the provider. Reports and pickles do not have them. No variable sets them.
        store_concurrency: Number of parts of an object that a rank uploads at once, or of ranges that it reads, 1 to
            16, for paths that are URLs. Each takes 8 MiB of the ring, which is made larger if need be.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    ring_bytes: int = 24 * _MIB
    io_threads: int = 2
    load_io_threads: int = 0
    niceness: int = 9
    write_bytes_per_s: int = 0
    direct_io: bool = True
    verify: bool = True
    commit_deadline_s: float = 3600.0
    io_timeout_s: float = 1800.0
    visibility_timeout_s: float = 60.0
    take_over: bool = False
    allow_partial_tensors: bool = False
    accept_rewritten_metadata: bool = False
    enable_tree_topo: bool = True
    tree_topo_threshold: int = 64
    tree_topo_fan_out: int = 16
    planning: str = "ours"
    planner_cache_capacity: int = 8
    allow_pickle: bool = False
    unsafe_objects: str = "warn"
    differing_copies: str = "warn"
    tensor_subclasses: str = "parts"
    shared_reading: str = "auto"
    staging_bytes: int = 0
    overlap_staging: bool = False
    staging_threads: int = 2
    on_staging_busy: str = "wait"
    handle_sigterm: bool = False
    exit_timeout_s: float = 1800.0
    failed_save_exit_code: int = 0
    stall_timeout_s: float = 60.0
    digest: bool = False
    link_unchanged: bool = False
    link_rewrite_every: int = 20
    trace: str = "summary"
    journal: str = "auto"
    journal_hosts: bool = True
    slow_factor: float = 2.0
    progress: bool = False
    storage_options: Mapping[str, Any] | None = None
    store_concurrency: int = 8

    def __post_init__(self) -> None:
        if self.storage_options is not None and not isinstance(self.storage_options, StorageOptions):
            if not isinstance(self.storage_options, Mapping):
                raise ConfigError("Config(storage_options=...): must be a dict of options by name")
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        for name, kind in _plain_fields().items():
            value = getattr(self, name)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ConfigError(f"Config({name}={value!r}): must be of type {kind.__name__}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(
                    f"Config({name}={value!r}): must be one of {', '.join(choices)}{did_you_mean(value, choices)}"
                )
        self._check("ring_bytes", 16 * _MIB, 256 * _MIB)
        self._check("io_threads", 1, 16)
        self._check("load_io_threads", 0, 16)
        self._check("niceness", 0, 19)
        if self.write_bytes_per_s != 0:
            self._check("write_bytes_per_s", _MIB, float("inf"))
        self._check("commit_deadline_s", 0.0, float("inf"))
        self._check("io_timeout_s", 0.0, float("inf"))
        self._check("visibility_timeout_s", 0.0, float("inf"))
        self._check("tree_topo_threshold", 1, float("inf"))
        self._check("tree_topo_fan_out", 2, 1024)
        self._check("planner_cache_capacity", 1, 1024)
        self._check("staging_bytes", 0, float("inf"))
        self._check("staging_threads", 1, 64)
        self._check("exit_timeout_s", 0, 86400)
        self._check("failed_save_exit_code", 0, 255)
        self._check("stall_timeout_s", 1, 86400)
        self._check("store_concurrency", 1, 16)
        self._check("link_rewrite_every", 1, float("inf"))
        self._check("slow_factor", 0.0, float("inf"))

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"Config({name}={value!r}): must be a number from {low} to {high}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads ``BYTECHECKPOINT_<FIELD>`` variables, for example ``BYTECHECKPOINT_RING_BYTES=134217728``.

        Variables of ByteCheckpoint, the reference, are understood too; see ``reference_variables``. Where such a
        variable and the variable of a field mean the same setting, the variable of the field wins.

        Args:
            environ: The variables to read; None takes ``os.environ``.

        Raises:
            ConfigError: A variable with that prefix names no field, its value is not of the field's type, or a variable
                of the reference asks for something that this package does not have.
        """
        environ = os.environ if environ is None else environ
        kinds = _plain_fields()
        fields = {_PREFIX + name.upper(): name for name in kinds}
        of_reference, understood = fields_of(environ)
        values: dict[str, bool | int | float | str] = {
            field: _parse(field, text, kinds[field]) for field, text in of_reference.items()
        }
        if "io_threads" in of_reference and _PREFIX + "IO_THREADS" not in environ:  # it applies to saves only
            values.setdefault("load_io_threads", cls.io_threads)
        for variable, text in environ.items():
            if not variable.startswith(_PREFIX) or variable in understood:
                continue
            if variable not in fields:
                known = sorted({*fields, *KNOWN})
                raise ConfigError(
                    f"{variable}: no such setting; known are {', '.join(known)}{did_you_mean(variable, known)}"
                )
            values[fields[variable]] = _parse(variable, text, kinds[fields[variable]])
        return cls(**values)  # type: ignore[arg-type]


@functools.cache
def _plain_fields() -> dict[str, type]:
    """Returns the types of the fields that are one number or word."""
    return {name: kind for name, kind in get_type_hints(Config).items() if name != "storage_options"}


def _parse(variable: str, text: str, kind: type) -> bool | int | float | str:
    if kind is str:
        is_path = variable == _PREFIX + "JOURNAL" and text.strip().lower() not in ("auto", "off")
        return text.strip() if is_path else text.strip().lower()
    try:
        if kind is bool:
            return _WORDS[text.strip().lower()]
        return int(text) if kind is int else float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{variable}={text!r}: must be of type {kind.__name__}") from None
