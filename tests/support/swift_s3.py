# SPDX-License-Identifier: Apache-2.0
"""Runs OpenStack Swift on this machine, which speaks S3 by its middleware s3api: one server of each kind."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from support.ports import free_port
from support.server_processes import ServerProcesses, options_for, wait_for_bucket

__all__ = ["PACKAGES", "Swift"]

PACKAGES = ("swift-proxy", "swift-account", "swift-container", "swift-object")
_KINDS = ("account", "container", "object")
_COMMON = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = root
swift_dir = {root}
devices = {root}
mount_check = false
log_level = CRITICAL
"""
_STORAGE = "[pipeline:main]\npipeline = {kind}-server\n[app:{kind}-server]\nuse = egg:swift#{kind}\n"
# s3api needs a cache in its pipeline, but works without the memcached that it asks: nobody listens on port 1.
_PROXY = """\
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth bulk copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_key_user = {secret} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""
_SECRET = "not-to-be-told"


class Swift:
    """A new server, which has the bucket ``checkpoints``. Needs ``PACKAGES`` of Debian, and root.

    Attributes:
        options: The ``storage_options`` for this server.
    """

    @staticmethod
    def missing() -> list[str]:
        """Returns the packages that are not installed."""
        return [name for name in PACKAGES if shutil.which(f"{name}-server") is None]

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swift-")
        root = Path(self._folder.name)
        (root / "device").mkdir()
        self._processes = ServerProcesses(root / "log")
        try:
            for kind in _KINDS:
                port = free_port()
                ring = str(root / f"{kind}.builder")
                for step in (("create", "4", "1", "0"), ("add", f"r1z1-127.0.0.1:{port}/device", "1"), ("rebalance",)):
                    subprocess.run(["swift-ring-builder", ring, *step], check=True, capture_output=True)
                self._start(kind, root, port, _STORAGE.format(kind=kind))
            port = free_port()
            self._start("proxy", root, port, _PROXY.format(secret=_SECRET))
            self.options = options_for(port, "key:user", _SECRET)
            wait_for_bucket(self.options, self._processes)
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def _start(self, kind: str, root: Path, port: int, pipeline: str) -> None:
        settings = root / f"{kind}.conf"
        settings.write_text(_COMMON.format(port=port, root=root) + pipeline)
        self._processes.start(f"swift-{kind}-server", str(settings))

    def close(self) -> None:
        self._processes.close()
        self._folder.cleanup()
