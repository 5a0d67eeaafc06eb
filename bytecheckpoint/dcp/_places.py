# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a save or a load mean the same place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from errno import ENOENT

from bytecheckpoint.dcp._save_session import RankResult
from bytecheckpoint.errors import CheckpointChangedError, ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.sharing.choice import ReadPreferences
from bytecheckpoint.storage.folders import folder_at

__all__ = ["SavesSeen", "refuse_other_places"]

# An error names no more ranks than this.
_MOST_NAMED = 8


def refuse_other_places(path: str, results: Sequence[RankResult], coordinator: int) -> None:
    """Refuses a save of ranks that were given different paths, unless these are names of one directory.

    Hosts may have the same storage at different paths. So a rank of another host is refused only if the coordinator
    does not see what that rank wrote, or that rank did not see the directory of the coordinator.

    Args:
        path: Path of the coordinator.
        results: What all ranks handed in.
        coordinator: Number of the coordinator.

    Raises:
        ConfigError: Some ranks save elsewhere. The message names them and their paths.
    """  # noqa: DOC501
    host = next((result.host for result in results if result.rank == coordinator), "")
    others = [result for result in results if _is_elsewhere(path, result, host)]
    if others:
        raise _different("save", path, coordinator, {result.rank: result.path for result in others})


class SavesSeen:
    """The saves that the ranks of a load have found; the coordinator keeps them for the next attempt of the load."""

    def __init__(self) -> None:
        self._before: list[str] = []
        self._since = 0.0  # when these were found for the first time

    def refuse_others(self, path: str, preferences: Sequence[ReadPreferences | None], coordinator: int) -> None:
        """Refuses a load in which ranks read different saves.

        A newer commit that came while the ranks opened the checkpoint explains that once. If the ranks find the very
        same saves again, they do not see one storage, or some see late what others have committed.

        Args:
            path: Path of the coordinator.
            preferences: What each rank said; None for a rank that said nothing.
            coordinator: Number of the coordinator.

        Raises:
            CheckpointChangedError: The ranks read different saves for the first time.
            ConfigError: They were given the paths of different places, or read the same different saves as before, for
                longer than any of them may see a commit late; or only some of them said what they read.
        """  # noqa: DOC501
        silent = [str(rank) for rank, said in enumerate(preferences) if said is None]
        if 0 < len(silent) < len(preferences):
            raise ConfigError(
                f"load({path}): it is not known which save rank {listed(silent, _MOST_NAMED)} would read: the reader "
                "there is no BcpReader, or a subclass whose prepare_local_plan does not return the plan that "
                "super().prepare_local_plan(plan) returns. Use the same reader on all ranks, and let it return that "
                "plan",
                path,
            )
        saves = [str(said and said.save) for said in preferences]
        before, self._before = self._before, saves
        if len({*saves}) == 1:
            return
        if saves != before:
            self._since = time.monotonic()
        late_s = max((said.visible_within_s for said in preferences if said), default=0.0)
        others = {
            rank: said.path for rank, said in enumerate(preferences) if said and not folder_at(path).is_same(said.path)
        }
        if others:
            raise _different("load", path, coordinator, others)
        ranks_of: dict[tuple[str, str], list[str]] = {}
        for rank, said in enumerate(preferences):
            host = str(said.place) if said and said.place else "an unknown host"
            ranks_of.setdefault((saves[rank], host), []).append(str(rank))
        texts = [f"save {save} on rank {listed(ranks)} on {host}" for (save, host), ranks in ranks_of.items()]
        found = f"load({path}): the ranks find different saves there: {listed(texts, _MOST_NAMED)}"
        if saves == before and time.monotonic() - self._since >= late_s:
            raise ConfigError(
                f"{found}, and did so when they looked again: the path is not shared between the ranks, or the file "
                "system shows some of them an old state for long. Put the checkpoint where all machines see the same "
                "files, and load it with the same path on all ranks",
                path,
            )
        raise CheckpointChangedError(
            f"{found}: a newer commit came in between, or the path is not shared between the ranks. Load again; if the "
            "error says the same saves then, put the checkpoint where all machines see the same files",
            path,
        )


def _different(what: str, path: str, coordinator: int, others: Mapping[int, str]) -> ConfigError:
    paths = [f"'{other}' on rank {rank}" for rank, other in others.items()]
    return ConfigError(
        f"{what}({path}): the path is '{path}' on rank {coordinator}, and {listed(paths, _MOST_NAMED)}, and these are "
        "different places: pass the same path on all ranks",
        path,
    )


def _is_elsewhere(path: str, result: RankResult, host: str) -> bool:
    folder = folder_at(path)
    is_same = folder.is_same(result.path)
    if is_same is not None:
        return not is_same
    if getattr(result.error, "errno", None) == ENOENT:
        return True  # it does not see the directory, which the coordinator had made
    if result.file_names and result.error is None:
        return not folder.sees(result.file_names)
    return result.host == host
