# SPDX-License-Identifier: Apache-2.0
"""Runs the smallest cluster of Ceph on this machine, with a file system or an object gateway on it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import ClassVar

from support.ports import free_port
from support.server_processes import ServerProcesses, options_for, wait_for_bucket

__all__ = ["CephFs", "CephRgw"]

# The OSD keeps its objects in memory.
_SETTINGS = """\
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{port}/0
public_network = 127.0.0.0/8
ms_bind_port_min = 22000
ms_bind_port_max = 29000
auth_cluster_required = cephx
auth_service_required = cephx
auth_client_required = cephx
keyring = {root}/keyring
run_dir = {root}
admin_socket = {root}/$name.$pid.asok
log_file = {root}/$name.log
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
osd_objectstore = memstore
memstore_device_bytes = 1073741824
osd_class_load_list = *
osd_class_default_list = *
osd_data = {root}/osd
mon_data = {root}/mon
mgr_data = {root}/mgr
mds_data = {root}/mds
mgr_initial_modules =
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{rgw}
rgw_enable_usage_log = false
rgw_thread_pool_size = 64
"""
_SECRET = "not-to-be-told"
_START_LIMIT_S = 120.0


class _Cluster:
    """A new monitor, manager and OSD. Their ``client.admin`` may do everything.

    Attributes:
        packages: Those of Debian that it needs, each with a program that is in it.
    """

    packages: ClassVar[dict[str, str]] = {"ceph-mon": "ceph-mon", "ceph-mgr": "ceph-mgr", "ceph-osd": "ceph-osd"}

    @classmethod
    def missing(cls) -> list[str]:
        """Returns the packages that are not installed."""
        return [package for package, program in cls.packages.items() if shutil.which(program) is None]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ceph-")
        self._root = Path(self._folder.name)
        self._processes = ServerProcesses(self._root / "log")
        self._settings = self._root / "ceph.conf"
        self._port_of_service = free_port()
        fsid, port = str(uuid.uuid4()), free_port()
        self._settings.write_text(_SETTINGS.format(fsid=fsid, port=port, rgw=self._port_of_service, root=self._root))
        try:
            self._start_cluster(fsid, port)
            self._serve()
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def _start_cluster(self, fsid: str, port: int) -> None:
        keys, monitors = str(self._root / "keyring"), str(self._root / "monmap")
        for folder in ("mon", "mgr", "osd", "mds"):
            (self._root / folder).mkdir()
        everything = [word for name in ("mon", "osd", "mgr", "mds") for word in ("--cap", name, "allow *")]
        self._run("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "mgr.a", "osd.0", "mds.a", "client.rgw"):
            self._run("ceph-authtool", keys, "--gen-key", "-n", name, *everything)
        self._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{port}]", "--fsid", fsid, monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", keys)
        self._start("ceph-mon", "-i", "a")
        self._start("ceph-mgr", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0")

    def _serve(self) -> None:
        raise NotImplementedError

    def _start(self, program: str, *arguments: str) -> None:
        self._processes.start(program, "-c", str(self._settings), *arguments, "-f")

    def _run(self, program: str, *arguments: str) -> str:
        command = [program, *arguments]
        if program not in ("ceph-authtool", "monmaptool"):
            command[1:1] = ["-c", str(self._settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
        return done.stdout

    def close(self) -> None:
        self._processes.close()
        self._folder.cleanup()


class CephRgw(_Cluster):
    """A new object gateway, which has the bucket ``checkpoints``.

    Attributes:
        options: The ``storage_options`` for this server.
    """

    packages: ClassVar[dict[str, str]] = _Cluster.packages | {"radosgw": "radosgw"}

    def _serve(self) -> None:
        self._start("radosgw", "-n", "client.rgw")
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=tests", "--display-name=tests",
                  "--access-key=key", f"--secret-key={_SECRET}")  # fmt: skip
        self.options = options_for(self._port_of_service, "key", _SECRET)
        wait_for_bucket(self.options, self._processes)


class CephFs(_Cluster):
    """A new file system.

    Attributes:
        mount: The command that mounts it, and stays in the foreground; behind it comes the place.
    """

    packages: ClassVar[dict[str, str]] = _Cluster.packages | {"ceph-mds": "ceph-mds", "ceph-fuse": "ceph-fuse"}

    def _serve(self) -> None:
        self._start("ceph-mds", "-i", "a")
        for pool in ("names", "contents"):
            self._run("ceph", "osd", "pool", "create", pool, "1")
        self._run("ceph", "fs", "new", "checkpoints", "names", "contents")
        until = time.monotonic() + _START_LIMIT_S
        while "up:active" not in self._run("ceph", "mds", "stat"):
            assert time.monotonic() < until, self._run("ceph", "status")
            time.sleep(0.5)
        self.mount = ("ceph-fuse", "-f", "-c", str(self._settings), "-n", "client.admin")
