# SPDX-License-Identifier: Apache-2.0
"""The newest checkpoint of a run, as one rank sees it or as all ranks agree on it. Needs torch for a group alone."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from errno import ENOENT
from typing import TYPE_CHECKING

from bytecheckpoint.checkpoint.newest import Newest, newest_in, newest_whole
from bytecheckpoint.checkpoint.roles import check_role, folder_of_role
from bytecheckpoint.config import Config
from bytecheckpoint.errors import StorageError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import Place, TieredPath, as_place, below, location, name_of, parent_of
from bytecheckpoint.storage.tiers import Tiers

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["latest", "one_look"]

_BETWEEN_LOOKS_S = 0.1


def latest(
    run: str | os.PathLike[str],
    role: str = "",
    *,
    before: int | str | os.PathLike[str] | None = None,
    pattern: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: Config | None = None,
) -> str | None:
    """Returns the folder of the newest whole checkpoint of a run; None if the run has none yet.

    ``resume`` finds and loads it in one call. Else pass it to ``load_state_dict`` or ``BcpReader``, or to
    ``bytecheckpoint.load`` if ``bytecheckpoint.save`` saved it::

        path = bytecheckpoint.latest("run", process_group=torch.distributed.group.WORLD)
        if path is not None:
            bytecheckpoint.load_state_dict(path, state)

    It looks at what is on disk now, and changes nothing. With a process group it is collective over that: the lowest
    rank looks and tells the others, so that all load the same step, also from a file system that shows new folders
    late. Each rank gets the path below its own ``run``, once it sees that folder. Without a group it is local, and
    ranks may get different answers.

    The newest checkpoint is the one that the tracker of ``bytecheckpoint.save`` names; without a tracker, the one that
    was committed last; of those committed at the same time, the one of the highest step. ``find_latest_ckpt_path``,
    ``Retention`` and ``bcp steps`` use the same order. The time of a commit is that of the last change of the commit
    mark, ``.metadata``; docs/retention.md says what that means for copies. A ``RuntimeWarning`` names the steps that
    have higher numbers and, if the tracker decides, the one that was committed last.

    Step folders are those with names that ``scan_steps`` knows, or that match ``pattern``, whoever wrote them, and
    symbolic links with such names. For each newer one that is passed over, a ``RuntimeWarning`` says why. A checkpoint
    is whole if the first look of a load accepts it, which checks all of ``.metadata``, and if its files are there and
    its tensors have all elements.

    None means that training may begin at step 0: there is no such folder, it has no step folders, or no checkpoint was
    ever committed in them (they are empty, hold other things, or hold what dead first saves left). It is an error if no
    checkpoint is whole, but one was committed or cannot be looked at: training from step 0 would in the end replace
    data that may still be rescued.

    Args:
        run: Folder of the run. Of ``Tiers``, the newest of all places is returned, from the nearest that has it.
        role: The role that ``bytecheckpoint.save`` saved the checkpoint with.
        before: A step of the run, by its number or its folder: the newest before that one is returned.
        pattern: Regular expression for the names of step folders, whose group is the step; see ``scan_steps``.
        process_group: Group of the ranks that will load; None looks on this rank alone. Pass
            ``torch.distributed.group.WORLD`` for all ranks; it is None in a process without a default group.
        config: Settings for the store, if ``run`` is a URL; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        UnsupportedError: ByteCheckpoint 0.0.2 or 0.0.3 wrote the steps.
        CheckpointError: There were checkpoints, and none is whole. The message says what they are, newest first.
        ConfigError: ``run`` is a URL of an unknown kind, or is a checkpoint itself and not a folder of step folders; or
            ``role`` is unknown; or ``before`` is no committed step of the run; or ``pattern`` is needed, or is wrong.
        StorageError: The folder cannot be listed. Or a rank does not see the folder that the lowest one has found; the
            message names it.
        RankLostError: A rank was lost meanwhile.
    """
    found = one_look(
        "latest", run, role, config, process_group, lambda folder: newest_whole(folder, pattern, "latest", before)
    )
    for text in found.warnings:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found.path


def one_look(
    asked: str,
    run: str | os.PathLike[str],
    role: str,
    config: Config | None,
    process_group: dist.ProcessGroup | None,
    look: Callable[[Place], Newest],
) -> Newest:
    """Returns what ``look`` finds in the folder of a run: on this rank, or on the lowest of a group for all of it.

    Args:
        asked: Name of the function that the user called.
        run: See ``latest``.
        role: See ``latest``.
        config: See ``latest``.
        process_group: See ``latest``.
        look: Takes the folder of the step folders.

    Returns:
        What the lowest rank has found, as a path of this rank. The warnings are on the lowest rank alone.

    Raises:
        Exception: What ``look`` raised there, on all ranks.
        StorageError: See ``latest``.
    """
    has_memory = True

    def runs() -> list[Place]:
        places = run.places if isinstance(run, TieredPath) else (location(run),)
        if isinstance(run, Tiers) and run.memory is not None and not has_memory:
            places = places[1:]
        return [folder_of_role(known(place, config), check_role(role)) for place in places]

    if isinstance(run, TieredPath):
        run.open()
    if process_group is None:
        return newest_in(runs(), look, asked)
    from bytecheckpoint.dcp.tiers_to_load import meet_to_load
    from bytecheckpoint.distributed.agreement import agree, all_together, gathered
    from bytecheckpoint.distributed.call_order import next_turn
    from bytecheckpoint.distributed.groups import own_group

    settings, name = config or Config.from_env(), str(run)
    turn = next_turn(process_group, False, asked)
    group = own_group(process_group, False, "calls", settings.stall_timeout_s, (asked, name))
    if group is None or group.size() == 1:
        return newest_in(runs(), look, asked)
    has_memory = meet_to_load(run, group, asked, settings)
    found, folders, failure = Newest(None), list[Place](), None
    try:
        folders = runs()
        if group.rank() == 0:
            found = newest_in(folders, look, asked)
    except Exception as error:
        failure = error
    agree(group, asked, name, {"role": role}, failure, turn=turn)
    # Machines may have the run at different paths.
    below_run = None if found.path is None else _in_one_of(folders, as_place(found.path))
    below_run = gathered(group, asked, name, below_run)[0]
    if below_run is None:
        return Newest(None, found.warnings)
    at, names = below_run
    path = below(folders[at], names)
    all_together(
        group, asked, name, lambda: _wait_until_seen(asked, path, process_group.rank(), settings.visibility_timeout_s)
    )
    return Newest(str(path), found.warnings)


def _in_one_of(runs: Sequence[Place], path: Place) -> tuple[int, str]:
    """Returns which of the folders of a run a step is in, and its path relative to that."""
    at = next((at for at, run in enumerate(runs) if parent_of(path) == run), 0)
    return at, os.path.relpath(path, runs[at])


def _wait_until_seen(asked: str, path: Place, rank: int, timeout_s: float) -> None:
    """Waits until this machine sees a folder that another one has found.

    Raises:
        StorageError: It does not.
    """
    until = time.monotonic() + timeout_s
    while folder_at(path).is_gone():
        if time.monotonic() > until or not _core.look_anew(str(path)):
            raise StorageError(
                f"{asked}({parent_of(path)}): the lowest rank has found {name_of(path)}, and rank {rank} on "
                f"{socket.gethostname()} does not see that folder: pass a folder that all ranks share, as they must to "
                "load from it",
                str(path),
                ENOENT,
            )
        time.sleep(_BETWEEN_LOOKS_S)
