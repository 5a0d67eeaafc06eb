# SPDX-License-Identifier: Apache-2.0
"""``bytecheckpoint.resume``: loads the newest checkpoint of a run that really loads."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from bytecheckpoint.checkpoint.newest import Newest, newest_whole
from bytecheckpoint.config import Config
from bytecheckpoint.contents.contents import open_contents
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.distributed.agreement import all_together, gathered
from bytecheckpoint.distributed.groups import own_group
from bytecheckpoint.distributed.launch import refuse_unaware_rank
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LoadFailedError,
)
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core
from bytecheckpoint.report import LoadReport
from bytecheckpoint.state_dicts import load_state_dict
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place, as_place, below, location, name_of, parent_of
from bytecheckpoint.storage.step_names import compile_pattern, step_number
from bytecheckpoint.training_state.latest import one_look
from bytecheckpoint.training_state.loading import LoadResult, load

__all__ = ["Resumed", "resume"]

_ASKED = "resume"

_logger = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What ``resume`` has loaded.

    Attributes:
        path: Folder of the checkpoint.
        step: Number of its step, as its name says.
        user_metadata: What was passed to the save as ``user_metadata``; None if nothing was.
        passed_over: Folders of newer steps that were found damaged, the newest first.
        report: Report of the load; with ``framework`` its ``LoadResult``.
    """

    path: str
    step: int
    user_metadata: Any = None
    passed_over: tuple[str, ...] = ()
    report: LoadReport | LoadResult


def resume(
    run: str | os.PathLike[str],
    state: dict[str, Any],
    *,
    framework: str | None = None,
    role: str = "",
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    spec: LoadSpec | None = None,
    per_rank: MutableMapping[str, Any] | None = None,
    must_exist: bool = False,
    max_steps_back: int = 1,
    pattern: str | None = None,
    config: Config | None = None,
) -> Resumed | None:
    """Loads the newest checkpoint of a run in place, and says which step it is. Collective over ``process_group``.

    Call it once, before the first step, on every rank::

        resumed = bytecheckpoint.resume("run", state)
        first_step = 0 if resumed is None else resumed.step

    Which step is the newest, ``latest`` says: one rank looks and tells the others. Should the load find damage in it,
    which no look at names and sizes can find, a ``RuntimeWarning`` says so on the lowest rank, and the step before it
    is loaded. Nothing of the first try is left then: all that it filled is filled again. Only damage
    (``CorruptCheckpointError`` on every rank that failed) goes back a step. Wrong keys, shapes or permissions, storage
    that does not answer, and a lost rank are raised, since the step before would not help, or might be the wrong one.
    After an error the state is undefined, as after any load that failed.

    A run that has no checkpoint yet, also one whose folder is missing, is None on every rank, with one line in the log.
    If some ranks see a checkpoint and the lowest one sees none, all raise: they do not share the folder.

    Args:
        run: Folder of the run, with one folder for each step; or its URL; or ``Tiers``: then a step that is damaged in
            one place is loaded from another that has it, before an older one is.
        state: State dict to load into, as ``load_state_dict`` takes it. With ``framework`` the live objects, as
            ``bytecheckpoint.load`` takes them.
        framework: Framework of the live objects, for checkpoints of ``bytecheckpoint.save``; None for state dicts.
        role: The role that ``bytecheckpoint.save`` saved with.
        process_group: Group of the ranks that load; None takes the default group, if there is one.
        no_dist: Whether this process loads alone, whatever groups there are. Not with ``framework``.
        spec: What to load, under which names, in which form; see ``LoadSpec``. If it allows keys to be missing, a step
            is gone back only if the older checkpoint has all the keys of the damaged one.
        per_rank: See ``load_state_dict``. Not with ``framework``, where it is ``extra_state``.
        must_exist: Whether it is an error that there is no checkpoint.
        max_steps_back: How many damaged steps may be passed over; 0 raises at the first.
        pattern: Regular expression for the names of step folders, whose group is the step; see ``scan_steps``.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        What was loaded; None if the run has no checkpoint yet. The same on all ranks, but for paths and reports.

    Raises:
        CheckpointNotFoundError: ``must_exist``, and there is no checkpoint.
        CorruptCheckpointError: More steps were damaged than may be passed over, or there is no step before.
        CheckpointError: There are checkpoints, and none is whole; or the load failed, see ``load_state_dict`` and
            ``load``; or ranks see different runs.
        ConfigError: An argument does not fit. Or a launcher has started several ranks, and there is no process group.
    """
    _check(run, framework, no_dist, max_steps_back, per_rank)
    if process_group is None and not no_dist:
        refuse_unaware_rank(_ASKED, str(run))
        process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    settings = config or Config.from_env()
    options: dict[str, Any] = {"process_group": process_group, "spec": spec, "config": settings}
    passed: list[str] = []
    failure: CheckpointError | None = None
    while True:
        found = _look(run, role, passed, pattern, process_group, settings)
        if failure is not None:
            steps = {name_of(as_place(path)) for path in passed}
            if found.path is None:
                failure.add_note(f"{_ASKED}({run}): there is no whole checkpoint before {passed[-1]}")
                raise failure
            if len(steps - {name_of(as_place(found.path))}) > max_steps_back:
                raise failure
        for text in found.warnings:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        if found.path is None:
            _say_nothing_there(run, must_exist)
            return None
        if failure is not None:
            _refuse_fewer_keys(passed[-1], found.path, spec, settings, failure)
            _say_passed_over(run, passed[-1], found.path, failure, process_group)
        try:
            report: LoadReport | LoadResult
            if framework is None:
                report = load_state_dict(found.path, state, no_dist=no_dist, per_rank=per_rank, **options)
            else:
                report = load(found.path, state, framework, role=role, **options)
        except CheckpointError as error:
            if not _is_damage(error):
                raise
            failure = error
            passed.append(found.path)
            continue
        return Resumed(
            path=found.path,
            step=_step_of(found.path, pattern),
            user_metadata=_user_metadata(run, found.path, process_group, settings),
            passed_over=tuple(passed),
            report=report,
        )


def _check(
    run: str | os.PathLike[str], framework: str | None, no_dist: bool, max_steps_back: int, per_rank: object
) -> None:
    if isinstance(max_steps_back, bool) or not isinstance(max_steps_back, int) or max_steps_back < 0:
        raise ConfigError(f"{_ASKED}({run}): max_steps_back={max_steps_back!r}: must be an int >= 0")
    if framework is not None and no_dist:
        raise ConfigError(f"{_ASKED}({run}): no_dist=True is for state dicts; bytecheckpoint.load has no such argument")
    if framework is not None and per_rank is not None:
        raise ConfigError(f"{_ASKED}({run}): per_rank is for state dicts; with a framework it is state['extra_state']")


def _look(
    run: str | os.PathLike[str],
    role: str,
    passed: Sequence[str],
    pattern: str | None,
    group: dist.ProcessGroup | None,
    config: Config,
) -> Newest:
    """Returns the newest whole step before those that were passed over, the same on all ranks.

    Raises:
        CheckpointError: The lowest rank sees none, and another one does.
    """

    def look(folder: Place) -> Newest:
        before = [path for path in passed if parent_of(as_place(path)) == folder]
        return newest_whole(folder, pattern, _ASKED, before[-1] if before else None)

    found = one_look(_ASKED, run, role, config, group, look)
    if found.path is not None or passed or group is None:
        return found
    own = own_group(group, False, "calls", config.stall_timeout_s, (_ASKED, str(run)))
    if own is None or own.size() == 1:
        return found
    seen: str | None = None
    try:
        seen = one_look(_ASKED, run, role, config, None, look).path
    except CheckpointError as error:
        seen = str(error)
    answers = gathered(own, _ASKED, str(run), (socket.gethostname(), seen))
    others = [(rank, *answer) for rank, answer in enumerate(answers) if answer[1] is not None]
    if others:
        rank, host, path = others[0]
        raise CheckpointError(
            f"{_ASKED}({run}): rank 0 on {answers[0][0]} sees no checkpoint, and rank {rank} on {host} sees {path}: "
            "pass a folder that all ranks share",
            str(run),
        )
    return found


def _say_nothing_there(run: str | os.PathLike[str], must_exist: bool) -> None:
    place = location(run)
    what = "there is no such folder" if folder_at(place).is_gone() else "it has no checkpoint yet"
    if must_exist:
        raise CheckpointNotFoundError(f"{_ASKED}({place}): {what}, and must_exist=True", str(place))
    _logger.info("%s(%s): %s: nothing is loaded", _ASKED, place, what)


def _is_damage(error: CheckpointError) -> bool:
    """Whether every rank that failed found bytes that are not what was written."""
    if isinstance(error, LoadFailedError):  # ranks failed with several classes
        return bool(error.reasons) and all(isinstance(each, CorruptCheckpointError) for each in error.reasons.values())
    return isinstance(error, CorruptCheckpointError)


def _refuse_fewer_keys(
    damaged: str, older: str, spec: LoadSpec | None, config: Config, failure: CheckpointError | None
) -> None:
    """Raises ``failure`` if a load of ``older`` might leave what the load of ``damaged`` has filled."""
    if spec is None or spec.strict in (True, "model") or failure is None:
        return
    missing = _keys(damaged, config) - _keys(older, config)
    if missing:
        failure.add_note(
            f"{_ASKED}: {older} is not loaded instead: it lacks {min(missing)}, and with "
            f"LoadSpec(strict={spec.strict!r}) that would keep what the failed load has put there"
        )
        raise failure


def _keys(path: str, config: Config) -> set[str]:
    contents = open_contents(path, config=config, kind=_core.Checkpoint)
    return {f"{item.component}: {item.name}" if item.component else item.name for item in contents.items}


def _say_passed_over(
    run: str | os.PathLike[str],
    damaged: str,
    instead: str,
    failure: CheckpointError | None,
    group: dist.ProcessGroup | None,
) -> None:
    if group is None or group.rank() == 0:
        what, other = name_of(as_place(damaged)), name_of(as_place(instead))
        what, other = (damaged, instead) if what == other else (what, other)
        text = f"{_ASKED}({run}): {what} is damaged, so {other} is loaded"
        warnings.warn(f"{text}: {failure}", RuntimeWarning, stacklevel=3)


def _step_of(path: str, pattern: str | None) -> int:
    match = compile_pattern(pattern).fullmatch(name_of(as_place(path)))
    return (step_number(match[1] or "") if match is not None else None) or 0


def _user_metadata(run: str | os.PathLike[str], path: str, group: dist.ProcessGroup | None, config: Config) -> Any:
    """Returns the user metadata of a checkpoint. The lowest rank reads them, and tells the others."""
    own = None if group is None else own_group(group, False, "calls", config.stall_timeout_s, (_ASKED, str(run)))

    def read() -> Any:
        if own is not None and own.rank() != 0:
            return None
        place = as_place(path)
        model = below(place, "model")
        at = model if not folder_at(place).has(".metadata") and folder_at(model).has(".metadata") else place
        return BcpReader(at, config=config).user_metadata

    found = all_together(own, _ASKED, str(run), read)
    return found if own is None or own.size() == 1 else gathered(own, _ASKED, str(run), found)[0]
