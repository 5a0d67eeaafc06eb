# SPDX-License-Identifier: Apache-2.0
"""Tests the basic promises on a network file system: this machine mounts its own NFS export.

Many kernels have no NFS server. There the tests are skipped, and say so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S, ForkServer
from support.jobs import run_job
from support.mounts import complaint_of, mounted
from support.saves import BOTH_RANKS, CONFIG, SaveRequest, assert_only_own_files, generation_on_disk, save

from bytecheckpoint import verify

OLD, NEW, NEXT = 1, 2, 3
UNTESTED = "NFS"
# Which generation loads after a death at each point. The save there has written its data; has checked its right to
# commit for the last time; has committed.
POINTS = {"write_data_done": OLD, "commit_decided": OLD, "commit_renamed": NEW}


@pytest.fixture
def network_disk(tmp_path: Path) -> Iterator[Path]:
    if missing := [tool for tool in ("exportfs", "rpc.nfsd", "rpc.mountd", "mount.nfs4") if shutil.which(tool) is None]:
        pytest.skip(f"{UNTESTED} NOT TESTED: {', '.join(missing)} not installed (nfs-kernel-server)")
    for module in ("nfsd", "nfsv4"):
        complaint_of("modprobe", module)  # may fail, because the kernel may have it built in
    if "nfsd" not in Path("/proc/filesystems").read_text():
        pytest.skip(f"{UNTESTED} NOT TESTED: this kernel has no NFS server")
    export = tmp_path / "export"
    export.mkdir()
    with ExitStack() as undo:
        undo.callback(complaint_of, "exportfs", "-u", f"127.0.0.1:{export}")
        for command in (
            ("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd"),
            ("exportfs", "-o", "rw,sync,no_root_squash,insecure,fsid=0", f"127.0.0.1:{export}"),
            ("rpc.nfsd", "4"),
        ):
            failed = complaint_of(*command)
            if failed and command[0] != "mount":  # mount may fail because it was done before
                pytest.skip(f"{UNTESTED} NOT TESTED: {failed}")
        mountd = undo.enter_context(subprocess.Popen(["rpc.mountd", "--foreground"]))
        undo.callback(mountd.wait, LIMIT_S)
        undo.callback(mountd.terminate)
        undo.callback(complaint_of, "rpc.nfsd", "0")
        where = ("-t", "nfs4", "-o", "vers=4.2", "127.0.0.1:/")
        yield undo.enter_context(mounted(tmp_path / "disk", *where, untested=UNTESTED))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saves_and_loads(num_ranks: int, server: ForkServer, network_disk: Path) -> None:
    path = network_disk / "ckpt"
    for generation in (OLD, NEW):
        run_job(server, SaveRequest(path, generation), num_ranks)
        assert generation_on_disk(path, BOTH_RANKS[:num_ranks]) == generation
        assert verify(path, config=CONFIG).is_whole
        assert_only_own_files(path)


@pytest.mark.parametrize("point", POINTS)
def test_kill(point: str, failpoint_server: ForkServer, server: ForkServer, network_disk: Path) -> None:
    path = network_disk / "ckpt"
    run_job(server, SaveRequest(path, OLD))
    outcome = failpoint_server.run(save, SaveRequest(path, NEW), env={"BCP_FAILPOINT": point})
    assert outcome.was_killed, f"{point} was not reached: {outcome}"
    assert generation_on_disk(path) == POINTS[point]
    run_job(server, SaveRequest(path, NEXT))
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)
