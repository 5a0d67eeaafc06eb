# SPDX-License-Identifier: Apache-2.0
"""Runs Ceph's object gateway on this machine, with the smallest cluster below it: a monitor, a manager, and an OSD."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

from support.ports import free_port
from support.server_processes import ServerProcesses, options_for, wait_for_bucket

__all__ = ["PACKAGES", "CephRgw"]

PACKAGES = {"ceph-mon": "ceph-mon", "ceph-mgr": "ceph-mgr", "ceph-osd": "ceph-osd", "radosgw": "radosgw"}
"""The packages of Debian, each with a program that is in it."""

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
mgr_initial_modules =
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{rgw}
rgw_enable_usage_log = false
rgw_thread_pool_size = 64
"""
_SECRET = "not-to-be-told"


class CephRgw:
    """A new gateway, which has the bucket ``checkpoints``. Needs ``PACKAGES`` of Debian.

    Attributes:
        options: The ``storage_options`` for this server.
    """

    @staticmethod
    def missing() -> list[str]:
        """Returns the packages that are not installed."""
        return [package for package, program in PACKAGES.items() if shutil.which(program) is None]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ceph-")
        self._root = Path(self._folder.name)
        self._processes = ServerProcesses(self._root / "log")
        self._settings = self._root / "ceph.conf"
        fsid, port, rgw = str(uuid.uuid4()), free_port(), free_port()
        self._settings.write_text(_SETTINGS.format(fsid=fsid, port=port, rgw=rgw, root=self._root))
        try:
            self._start_cluster(fsid, port)
            self._start("radosgw", "-n", "client.rgw")
            self._run("radosgw-admin", "-n", "client.rgw", "user", "create", "--uid=tests", "--display-name=tests",
                      "--access-key=key", f"--secret-key={_SECRET}")  # fmt: skip
            self.options = options_for(rgw, "key", _SECRET)
            wait_for_bucket(self.options, self._processes)
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def _start_cluster(self, fsid: str, port: int) -> None:
        keys, monitors = str(self._root / "keyring"), str(self._root / "monmap")
        for folder in ("mon", "mgr", "osd"):
            (self._root / folder).mkdir()
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        self._run("ceph-authtool", "--create-keyring", keys, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "mgr.a", "osd.0", "client.rgw"):
            self._run("ceph-authtool", keys, "--gen-key", "-n", name, *everything)
        self._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{port}]", "--fsid", fsid, monitors)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors, "--keyring", keys)
        self._start("ceph-mon", "-i", "a")
        self._start("ceph-mgr", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._start("ceph-osd", "-i", "0")

    def _start(self, program: str, *arguments: str) -> None:
        self._processes.start(program, "-c", str(self._settings), *arguments, "-f")

    def _run(self, program: str, *arguments: str) -> None:
        command = [program, *arguments]
        if program not in ("ceph-authtool", "monmaptool"):
            command[1:1] = ["-c", str(self._settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"

    def close(self) -> None:
        self._processes.close()
        self._folder.cleanup()
