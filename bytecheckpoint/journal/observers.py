# SPDX-License-Identifier: Apache-2.0
"""What happens at the end of a save or a load: the journal is written, and exporters hear of it.

A call waits for its line in the journal, so that nothing writes to a folder when the call has returned. It does not
wait for exporters, which a thread calls. It does not fail if any of that fails: the first failure of each kind is
logged as a warning.
"""

from __future__ import annotations

import atexit
import contextvars
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from bytecheckpoint.calls.stalls import WAITS_FOR_RANKS
from bytecheckpoint.config import Config
from bytecheckpoint.findings.findings import findings
from bytecheckpoint.journal.lines import append, place_of
from bytecheckpoint.journal.records import record_of
from bytecheckpoint.journal.trace_files import keep_trace
from bytecheckpoint.journal.work_thread import WorkThread
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.step_names import run_of
from bytecheckpoint.storage.tiers import tier_of

__all__ = [
    "OBSERVERS",
    "Exporter",
    "Observers",
    "OnReport",
    "flush",
    "note_call",
    "note_trace",
    "observe",
    "saying",
    "stop_observing",
]

# The end of the process waits no longer than this for what is not written yet.
_AT_EXIT_S = 5.0
# A call waits no longer than this for its line, or for its trace: then the storage does not answer.
_MOST_WRITE_S = 30.0
# At its end, a process says of each failed save so many letters.
_MOST_SHOWN = 200
# A call is compared with as many calls before, of at least so many.
_HISTORY, _LEAST_HISTORY = 10, 5
_LEAST_SLOWER_S = 0.5

_logger = logging.getLogger("bytecheckpoint")


OnReport: TypeAlias = Callable[[SaveReport | LoadReport], object]
"""A callback that gets the report of the coordinator."""


class Exporter(Protocol):
    """What ``observe`` takes: it hears of each call of which this process is the coordinator.

    If it also has a method ``export_failure``, that is called with a ``CallFailure`` for each call that failed.
    """

    def export(self, report: SaveReport | LoadReport, record: dict[str, Any]) -> None:
        """Takes one call. Runs in a thread of ours, one call after the other.

        Args:
            report: Report of the call.
            record: Its record, as in the journal.
        """
        ...


class Observers:
    """What the calls of this process left to do, and the threads that do it."""

    def __init__(self) -> None:
        self.exporters: list[Exporter | OnReport] = []
        self.durations: dict[tuple[str, str], deque[float]] = {}
        # Records of failed saves by the folder of their run, which wait for a save that commits.
        self.failures: dict[str, deque[dict[str, Any]]] = {}
        self._said: set[str] = set()
        self._lock = ForkSafeLock()
        # One thread each: an exporter that hangs must not keep a save from writing its line.
        self._writing = WorkThread("bytecheckpoint-journal", self._say_unrecorded)
        self._exporting = WorkThread("bytecheckpoint-observe", self._say_unrecorded)
        atexit.register(_flush_at_exit)

    def submit(self, work: Callable[[], None]) -> None:
        """Has exporters called."""
        self._exporting.submit(work)

    def write(self, folder: Path | str, write: Callable[[], None], config: Config) -> None:
        """Writes to a journal, and waits for that as long as a call may wait for its storage, and 30 s at most."""

        def write_or_say() -> None:
            try:
                write()
            except OSError as error:
                self.say_once(f"the journal in {folder} cannot be written", error)

        timeout_s = min(config.io_timeout_s or _MOST_WRITE_S, _MOST_WRITE_S)
        if not self._writing.run(write_or_say, timeout_s):
            late = TimeoutError(f"no answer of the storage in {timeout_s:g} s; a thread goes on")
            self.say_once(f"the journal in {folder} cannot be written", late)

    def flush(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        return self._writing.flush(timeout_s) and self._exporting.flush(max(end - time.monotonic(), 0.0))

    def _say_unrecorded(self, error: Exception) -> None:
        self.say_once("a call is not recorded", error)

    def say_once(self, what: str, error: Exception) -> None:
        if self._is_first(f"{what}: {type(error).__name__}"):
            _logger.warning("%s: %s; this is said once", what, error or type(error).__name__)

    def note_once(self, key: str, message: str) -> None:
        if self._is_first(key):
            _logger.info("%s", message)

    def _is_first(self, key: str) -> bool:
        with self._lock:
            is_first = key not in self._said
            self._said.add(key)
        return is_first


OBSERVERS = PerProcess(Observers)
"""Those of this process."""


def observe(exporter: Exporter | OnReport) -> None:
    """Gives every save and load from now on to ``exporter``, in the process of the coordinator.

    A thread of ours calls it after the call has ended, one call after the other, in the context variables of the thread
    that saved or loaded. The end of the process waits for it, for 5 s at most. If it raises, the first error of each
    kind is logged as a warning; the call does not fail. Forked children have no exporters.

    Args:
        exporter: One of ``bytecheckpoint.observability.exporters``, one of your own, or a function that takes the
            report. An exporter that observes already is not added again.
    """
    observers = OBSERVERS.get()
    if not _is_among(exporter, observers.exporters):
        observers.exporters = [*observers.exporters, exporter]
    # What runs at the end of the process is run in reverse order: ours before that of the exporter's library.
    atexit.unregister(_flush_at_exit)
    atexit.register(_flush_at_exit)


def stop_observing(exporter: Exporter | OnReport) -> None:
    """Undoes ``observe``. The exporter still gets the calls that have ended by now.

    Args:
        exporter: What was passed to ``observe``. If it does not observe, this has no effect.
    """
    observers = OBSERVERS.get()
    observers.exporters = [other for other in observers.exporters if not _is_among(other, [exporter])]


def _is_among(exporter: Exporter | OnReport, others: Sequence[Exporter | OnReport]) -> bool:
    # A bound method is another object each time it is asked for, and equals the others.
    return any(other is exporter or (callable(other) and other == exporter) for other in others)


def flush(timeout_s: float = 60.0) -> bool:
    """Waits until the calls so far are in the journal, and exported.

    Args:
        timeout_s: Seconds to wait at most.

    Returns:
        Whether they are.
    """
    observers = OBSERVERS.if_made()
    return observers is None or observers.flush(timeout_s)


def _flush_at_exit() -> None:
    flush(_AT_EXIT_S)
    observers = OBSERVERS.if_made()
    for run, records in [] if observers is None else [*observers.failures.items()]:
        if records:
            texts = [f"{each['error_type']}: {each['message']}".splitlines()[0] for each in records]
            named = [f"{each['path']}: {text[:_MOST_SHOWN]}" for each, text in zip(records, texts, strict=True)]
            _logger.warning("%s: no journal has the saves that failed last: %s", run, "; ".join(named))


def note_call(report: SaveReport | LoadReport, config: Config) -> None:
    """Notes and logs a call that has ended, on its coordinator. Returns when its line is in the journal.

    Args:
        report: Report of the coordinator.
        config: Settings of the call.
    """
    _logger.info("%s", report.summary())
    observers = OBSERVERS.get()
    if config.journal == "off" and not observers.exporters and not config.slow_factor:
        return
    if "://" in report.path and tier_of(report.path) != "memory" and config.journal == "auto":
        observers.note_once("url", f"{report.path}: no journal is kept beside a URL; Config(journal=FOLDER) keeps one")
    record: dict[str, Any] | None = None
    try:
        record = _written(observers, report, config)
    except Exception as error:  # the call has succeeded
        observers.say_once("a call is not recorded", error)
    exporters, context = observers.exporters, contextvars.copy_context()
    observers.submit(lambda: context.run(_tell, observers, exporters, report, record, config))


def _written(observers: Observers, report: SaveReport | LoadReport, config: Config) -> dict[str, Any] | None:
    """Writes the record of a call to its journal, and returns it; None if there is no journal."""
    is_save = isinstance(report, SaveReport)
    folder, path, step = place_of(report.path, config, is_save=is_save)
    if folder is None:
        return None
    record, at = record_of(report, config, path, step), folder
    failed = observers.failures.get(run_of(report.path), ()) if is_save else ()

    def write() -> None:
        while failed:
            append(at, failed[0])
            failed.popleft()
        append(at, record)

    observers.write(folder, write, config)
    return record


def note_trace(path: str, kind: str, rank: int, trace: RankTrace | None, config: Config) -> None:
    """Keeps the whole trace of a call on this rank, with ``Config(trace="full")``. Returns when it is written.

    Args:
        path: Path of the checkpoint.
        kind: ``save`` or ``load``.
        rank: Number of this rank in the call.
        trace: What this rank did.
        config: Settings of the call.
    """
    if trace is None or config.trace != "full":
        return
    folder, _, step = place_of(path, config, is_save=kind == "save")
    if folder is not None:
        at, whole = folder, trace
        OBSERVERS.get().write(folder, lambda: keep_trace(at, kind, step, rank, whole), config)


@contextmanager
def saying(observers: Observers, exporter: Exporter | OnReport) -> Iterator[None]:
    """Logs a failure of the ``with`` block, once."""
    try:
        yield
    except Exception as error:
        name = getattr(exporter, "__qualname__", type(exporter).__qualname__)
        observers.say_once(f"{name} failed", error)


def _tell(
    observers: Observers,
    exporters: Sequence[Exporter | OnReport],
    report: SaveReport | LoadReport,
    record: dict[str, Any] | None,
    config: Config,
) -> None:
    if record is None:
        _, path, step = place_of(report.path, config, is_save=isinstance(report, SaveReport))
        record = record_of(report, config, path, step)
    for exporter in exporters:
        with saying(observers, exporter):
            export: Callable[..., object] | None = getattr(exporter, "export", None)
            if export is not None:
                export(report, record)
            elif callable(exporter):
                exporter(report)
    _compare(observers, report, record, config)


def _compare(observers: Observers, report: SaveReport | LoadReport, record: dict[str, Any], config: Config) -> None:
    """Logs a line if the call was far slower than the calls before it."""
    key = (record["kind"], str(Path(report.path).parent))
    before = observers.durations.setdefault(key, deque(maxlen=_HISTORY))
    num_before, usual = len(before), statistics.median(before) if len(before) >= _LEAST_HISTORY else 0.0
    before.append(report.total_s)
    if not usual or not config.slow_factor or report.total_s < config.slow_factor * usual + _LEAST_SLOWER_S:
        return
    _logger.warning(
        "%s(%s): took %.2f s, the %d before it %.2f s in the median: %s",
        *(record["kind"], report.path, report.total_s, num_before, usual, _in_words(record)),
    )


def _in_words(record: dict[str, Any]) -> str:
    """Returns which rank or host made a call slow, in which phase, and why, as far as the figures tell."""
    # A rank that ended late for no reason that is known has no phase; `_slowest_of` names the one that it was in.
    found = [each for each in findings(record) if each.phase and (each.rank is not None or each.host is not None)]
    return f"{found[0].text} (phase {found[0].phase})" if found else _slowest_of(record)


def _slowest_of(record: dict[str, Any]) -> str:
    """Returns in words which rank of a call was busy for longest, in which phase, compared with the median."""
    ranks = record["ranks"]
    worst = (0.0, "", 0, 0.0)
    for phase, column in ranks["phases"].items():
        if phase in WAITS_FOR_RANKS or not column:
            continue
        place = max(range(len(column)), key=column.__getitem__)
        usual = statistics.median(column) if len(column) > 1 else 0.0
        worst = max(worst, (column[place] - usual, phase, place, usual))
    excess, phase, place, usual = worst
    if not phase:
        return "no rank stands out"
    host = record["hosts"][ranks["host"][place]]
    of_others = f" (median {usual:.2f} s)" if len(ranks["rank"]) > 1 else ""
    return f"rank {ranks['rank'][place]} on {host} was in phase {phase} for {usual + excess:.2f} s{of_others}"
