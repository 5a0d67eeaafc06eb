# SPDX-License-Identifier: Apache-2.0
"""Two machines of two ranks train, and save each step to memory, with a copy on the other machine. One of them is lost.

The machines are namespaces of this one, of networks and of processes, which takes root and ``ip``. The first job runs
undisturbed. In the second one, all that runs on a machine is killed, and what it had in memory is gone; the ranks of
the other machine are killed, too. Both start again, and go on from what the other machine has. The losses are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from killed_training import KILLED_AT, NEAR_EVERY, NUM_STEPS, kill_at, losses_of, train

from bytecheckpoint import MemoryTier, Tiers

SPACES = tuple(f"bcpd{os.getpid()}-{number}" for number in range(2))
RANKS_OF_A_MACHINE = 2


def places(folder: Path) -> Tiers:
    return Tiers(memory=MemoryTier(replicas=1, interface="e0"), near=folder / "run", near_every=NEAR_EVERY)


def address(machine: int) -> str:
    return f"10.97.0.{1 + machine}"


@contextmanager
def cable() -> Iterator[None]:
    """Makes two network namespaces with a cable between them."""

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=not check)

    try:
        for space in SPACES:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", SPACES[0], "link", "add", "e0", "type", "veth", "peer", "name", "e0", "netns", SPACES[1])
        for machine, space in enumerate(SPACES):
            ip("-n", space, "addr", "add", f"{address(machine)}/24", "dev", "e0")
            ip("-n", space, "link", "set", "e0", "up")
        yield
    finally:
        for space in SPACES:
            ip("netns", "del", space, check=False)


class Machine:
    """A namespace of processes, in one of networks. What is started in it ends with it."""

    def __init__(self, number: int) -> None:
        self._number = number
        command = ["ip", "netns", "exec", SPACES[number], "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen([*command, "sh", "-c", "echo; exec sleep 86400"], stdout=subprocess.PIPE)
        assert self._first.stdout is not None
        self._first.stdout.readline()
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self._inside = ["nsenter", "-t", children[0], "--net", "--pid", "--mount"]

    def start(self, folder: Path, port: int) -> subprocess.Popen[bytes]:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS_OF_A_MACHINE}"]
        launch += ["--nnodes=2", f"--node-rank={self._number}", "--master-addr", address(0), "--master-port", str(port)]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "e0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen([*self._inside, *launch, __file__, str(folder)], env=environ, start_new_session=True)

    def power_off(self) -> None:
        self._first.kill()
        self._first.wait()


def start_all(machines: list[Machine], folder: Path, port: int) -> list[subprocess.Popen[bytes]]:
    return [machine.start(folder, port) for machine in machines]


def show(machines: list[Machine], undisturbed: Path, lost: Path) -> None:
    """Trains in both folders. In the second one, the machine that is lost is replaced by a new one."""
    assert not any(job.wait() for job in start_all(machines, undisturbed, 29801))
    print(f"a machine is lost behind step {KILLED_AT}:", flush=True)
    jobs = start_all(machines, lost, 29802)
    kill_at(jobs[0], lost, KILLED_AT)
    machines[1].power_off()
    jobs[1].wait()
    machines[1] = Machine(1)
    assert not any(job.wait() for job in start_all(machines, lost, 29803))
    same = losses_of(lost) == losses_of(undisturbed)
    print(f"  the losses of {NUM_STEPS} steps are {'the same' if same else 'DIFFERENT'}")
    assert same


def main() -> None:
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), places(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as name, cable():
        undisturbed, lost = Path(name, "undisturbed"), Path(name, "lost")
        for folder in (undisturbed, lost):
            folder.mkdir()
        machines = [Machine(0), Machine(1)]
        try:
            show(machines, undisturbed, lost)
        finally:
            for machine in machines:
                machine.power_off()


if __name__ == "__main__":
    main()
