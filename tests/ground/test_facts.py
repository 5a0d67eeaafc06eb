# SPDX-License-Identifier: Apache-2.0
"""Measures what each file system does. The table in docs/guarantees.md shows it, as `make ground` found it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ground import facts
from ground.mounts import Ground, Machines
from ground.versions import version

# So long the second machine looks before the first one changes something.
_WAIT_S = 1.5


def _freshness(ground: Ground, machines: Machines) -> dict[str, object]:
    """Returns how late the second machine sees what the first one does, and what it reads between the two."""
    here, there = (view / "facts" for view in ground.views)
    found: dict[str, object] = {}

    def look(what: str, change: Callable[[Path, str], None], text: str, wanted: str, is_listed: bool = False) -> None:
        watching = machines[1].start(facts.watch, there / what, wanted, is_listed)
        made = machines[0].run(facts.late, change, here / what, text, _WAIT_S).unwrap()
        seen = machines[1].wait(watching).unwrap()
        is_seen = seen[-1][1] == wanted
        seconds = max(0.0, seen[-1][0] - made) if is_seen else facts.LIMIT_S
        between = [got for _, got in seen[1:] if got != wanted]
        found[what] = {"seconds": round(seconds, 1), "is_seen": is_seen, "between": between}

    machines[0].run(facts.write, here / "rename", "old").unwrap()
    machines[1].run(facts.watch, there / "rename", "old").unwrap()
    look("rename", facts.replace, "new and longer", "new and longer")
    look("create", facts.write, "created", "created")
    look("list", facts.write, "listed", "listed", is_listed=True)
    return found


def _locks(ground: Ground, machines: Machines) -> dict[str, bool]:
    """Returns whether a flock of the first machine keeps others out, by where they are."""
    paths = [view / "facts" / "lock" for view in ground.views]
    machines[0].run(facts.write, paths[0], "").unwrap()
    machines[1].run(facts.watch, paths[1], "").unwrap()
    pid = machines[0].start(facts.hold_lock, paths[0])
    assert machines[0].wait_stopped(pid)
    kept_out = {
        where: machine.run(facts.is_locked, path).unwrap()
        for where, machine, path in zip(("here", "there"), machines, paths, strict=True)
    }
    machines[0].wait(pid, 0.0)
    return kept_out


@pytest.mark.skipif(
    os.environ.get("BCP_GROUND") != "1", reason="takes minutes: set BCP_GROUND=1, as `make ground` does"
)
def test_facts(ground: Ground, machines: Machines, record_property: Callable[[str, object], None]) -> None:
    found: dict[str, object] = {"version": version(ground, machines[0]), "date": time.strftime("%Y-%m-%d")}
    at = ground.views[0] / "facts"
    machines[0].run(os.mkdir, at).unwrap()
    for name, measure in (("O_DIRECT", facts.direct_io), ("link", facts.links), ("no_replace", facts.no_replace)):
        found[name] = machines[0].run(measure, at / name).unwrap()
    found["late"] = _freshness(ground, machines)
    found["flock"] = locks = _locks(ground, machines)
    record_property("facts", found)
    if not locks["here"]:
        pytest.fail("a flock does not even keep out others of its own machine")
