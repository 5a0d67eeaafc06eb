# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of OLMo-core's trainer in ``Tiers``: what goes to which place, and when a step is copied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any

from bytecheckpoint.checkpoint.tier_drains import note_tier_commit, note_tier_file
from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.storage.olmo_steps import MODEL_AND_OPTIM, WRITTEN_LAST, has_checkpoint, in_final_folder
from bytecheckpoint.storage.paths import Place, as_place, below, location
from bytecheckpoint.storage.step_names import is_step_name
from bytecheckpoint.storage.tiers import Tiers, TierStep

__all__ = ["OlmoTiers", "olmo_tiers"]

_OF_TRAINER = re.compile(rf"(^|.*/)step\d+(-tmp)?/{MODEL_AND_OPTIM}")


def olmo_tiers(given: Tiers | Mapping[str, Any] | None, config: Config | None) -> OlmoTiers | None:
    """Returns the tiers of the setting ``tiers``; None for none.

    Args:
        given: ``Tiers``, or a dict of their arguments.
        config: Settings that a dict has if it names none.

    Raises:
        ConfigError: See ``Tiers``; or steps would be in memory alone.
    """
    tiers = Tiers.of({"config": config, **given} if isinstance(given, Mapping) else given)
    if tiers is None:
        return None
    if tiers.near_every != 1:
        raise ConfigError(
            f"bytecheckpoint.olmo: near_every={tiers.near_every}: OLMo-core looks for steps in folders, and would not "
            "find those in memory alone"
        )
    if not tiers.disks:
        raise ConfigError(
            "bytecheckpoint.olmo: Tiers with memory alone: OLMo-core writes files of its own to each step: pass its "
            "save folder as near"
        )
    return OlmoTiers(tiers)


class OlmoTiers:
    """The places of one run of OLMo-core's trainer, whose save folder is the near one.

    Args:
        tiers: The places.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self._write_file: Callable[..., Any] | None = None  # OLMo-core's

    def takes(self, path: str | os.PathLike[str]) -> bool:
        """Whether a save to a path goes to the tiers. It is local, and the same on all ranks.

        Raises:
            ConfigError: It is no step of the run; or a trainer saves a step to another folder.
        """
        rest = self._rest(path)
        if rest is None:
            if _OF_TRAINER.fullmatch(str(path)):
                raise ConfigError(
                    f"save({path}): this step is not in Tiers({self.tiers.place}): pass the save folder of OLMo-core's "
                    "trainer as near, or as durable if there is no near place"
                )
            return False
        self.tiers / in_final_folder(rest)
        self.tiers.place_to_write()
        return True

    def step_of(self, path: str | os.PathLike[str]) -> TierStep | None:
        """Returns what a load of a path reads, which may be in memory; None if the path is no step of the run."""
        rest = self._rest(path)
        return self.tiers / rest if rest is not None and is_step_name(rest.partition("/")[0]) else None

    def save(self, path: str, state: dict[str, Any], *, in_background: bool, config: Config, **given: Any) -> Any:
        """Saves as OLMo-core would have DCP do. Collective.

        Args:
            path: The folder that OLMo-core names.
            state: State dict.
            in_background: Whether to return a future of the save, when the state may change.
            config: Settings.
            given: Further arguments of OLMo-core's call.
        """
        options: dict[str, Any] = {"process_group": given.get("process_group"), "planner": given.get("planner")}
        if not in_background:
            return save_state_dict(path, state, config=config, **options)
        handle = async_save_state_dict(path, state, config=config, **options)
        handle.staged.result()
        return handle.committed

    def load(self, step: TierStep, state: dict[str, Any], *, config: Config, **given: Any) -> None:
        """Loads from the nearest place that has a step. Collective.

        Args:
            step: What ``step_of`` returned.
            state: State dict; its tensors are filled in place.
            config: Settings.
            given: Further arguments of OLMo-core's call.
        """
        options = {name: given[name] for name in ("process_group", "no_dist", "planner") if name in given}
        load_state_dict(step, state, config=config, **options)

    # What OLMo-core writes itself.

    def follow(self) -> None:
        """Has a step copied on once OLMo-core has written all of it, until ``leave``. Local."""
        checkpointer: Any = import_module("olmo_core.train.checkpoint").Checkpointer
        theirs = checkpointer.write_file

        @wraps(theirs)
        def write_file(of: Any, dir: Any, fname: Any, contents: Any) -> Any:
            written = theirs(of, dir, fname, contents)
            self._note_file(dir, str(fname))
            return written

        self._write_file, checkpointer.write_file = theirs, write_file

    def leave(self) -> None:
        """Ends what ``follow`` began."""
        import_module("olmo_core.train.checkpoint").Checkpointer.write_file = self._write_file

    def _note_file(self, folder: str | os.PathLike[str], name: str) -> None:
        rest = self._rest(folder)
        if rest is None or not is_step_name(rest):
            return
        step: Place = below(as_place(str(self.tiers.place)), rest)
        if not has_checkpoint(step):  # the save failed; OLMo-core writes this all the same
            return
        if name == WRITTEN_LAST:
            note_tier_commit(str(step))
        else:
            note_tier_file(str(step))

    def _rest(self, path: str | os.PathLike[str]) -> str | None:
        """Returns a path relative to the run; None if it is not below it."""
        run = f"{self.tiers.place}/"
        text = str(location(str(path).rstrip("/")))
        return text[len(run) :] if text.startswith(run) else None
