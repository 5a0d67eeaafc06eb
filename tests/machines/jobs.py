# SPDX-License-Identifier: Apache-2.0
"""Jobs whose ranks are on machines, one on each or more."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.machines import Machines
from support.preloading import preloaded

__all__ = ["NUM_MACHINES", "Run", "all_say", "asked_for"]

_OFF_CLOCK = Path(__file__).parents[1] / "support" / "off_clock.c"

asked_for = pytest.mark.skipif(not os.environ.get("BCP_GROUND"), reason="set BCP_GROUND=1")

NUM_MACHINES = 3
LIMIT_S = 90.0
_TESTS = Path(__file__).parents[1]


class Run:
    """Jobs of one program, one after the other.

    Args:
        machines: Where they run.
        program: What each rank runs; a file beside this one.
        tier: Arguments of ``MemoryTier``.
    """

    def __init__(self, machines: Machines, program: str = "memory_job.py", **tier: Any) -> None:
        self.machines = machines
        self._program = Path(__file__).with_name(program)
        self.tier = {"name": f"run-{os.getpid()}", "interface": "e0", "linger_s": 600.0, **tier}
        self._num_jobs = len([*machines.base.glob("job*")])
        self.control = machines.base
        self._clocks: dict[int, dict[str, str]] = {}  # variables by machine

    def job(self, on: Sequence[int], **asked: Any) -> dict[int, dict[str, Any]]:
        """Runs a job, and returns what its ranks say. They then end as if they were killed.

        Args:
            on: The machine of each rank.
            asked: What the program is asked for.
        """
        self.start(on, **asked)
        return self.end(range(len(on)))

    def start(self, on: Sequence[int], **asked: Any) -> None:
        self._num_jobs += 1
        self.control = self.machines.base / f"job{self._num_jobs}"
        self.control.mkdir()
        environment = {
            **os.environ, "MASTER_ADDR": self.machines.address(on[0]), "MASTER_PORT": str(29500 + self._num_jobs),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        for rank, machine in enumerate(on):
            text = json.dumps({"tier": self.tier, "ranks_saved": NUM_MACHINES, **asked})
            where = self.machines.folder, self.control, rank, len(on)
            command = [sys.executable, str(self._program), *map(str, where), text]
            self.machines.start(machine, command, environment | self._clocks.get(machine, {}))

    def set_clocks(self, seconds: Mapping[int, int]) -> None:
        """Makes the wall clocks of machines so many seconds off: of ranks that run with one set, and of later ones."""
        library = preloaded(_OFF_CLOCK, self.machines.base, untested="A WALL CLOCK THAT IS OFF")
        for machine, off in seconds.items():
            file = self.machines.base / f"clock{machine}"
            file.write_text(str(off))
            self._clocks[machine] = {"LD_PRELOAD": str(library), "OFF_CLOCK": str(file)}

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not (self.control / name).exists():
            files = sorted([*self.control.glob("stacks.*"), *self.control.glob("said.?")])
            stacks = [f"{file.name}:\n{file.read_text()}" for file in files]
            assert time.monotonic() < end, "\n".join([f"{name} does not come", *stacks])
            time.sleep(0.02)

    def go(self) -> None:
        (self.control / "go").touch()

    def end(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        for rank in ranks:
            self.wait_for(f"said.{rank}")
        (self.control / "end").touch()
        said = {rank: json.loads((self.control / f"said.{rank}").read_text()) for rank in ranks}
        for rank, of_rank in said.items():
            self.wait_for(f"here.{rank}")
            of_rank["files_here"] = json.loads((self.control / f"here.{rank}").read_text())
        errors = [of_rank["error"] for of_rank in said.values() if "error" in of_rank]
        assert not errors, errors[0]
        return said

    def seconds(self, *of: int | str) -> list[float]:
        """Returns how long saves took, or ``resume_s``, or ``load_s``, on each rank of the last job."""
        names = [f"seconds.{each}" if isinstance(each, int) else each for each in of]
        return [float(file.read_text()) for name in names for file in self.control.glob(f"{name}.[0-9]")]


def all_say(said: dict[int, dict[str, Any]], what: str) -> Any:
    """Returns what all ranks say, which must be the same."""
    answers = [of_rank[what] for of_rank in said.values()]
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]
