# SPDX-License-Identifier: Apache-2.0
"""Runs a real object store on this machine: SeaweedFS, from its package, on free loopback ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.ports import free_port
from support.server_processes import options_for

__all__ = ["SeaweedFS", "find_weed"]

_START_LIMIT_S = 60.0
_SECRET = "not-to-be-told"


def find_weed() -> str | None:
    """Returns the path of its program; None if the package is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class SeaweedFS:
    """A new server, which speaks S3 and has the bucket ``checkpoints``.

    Attributes:
        options: The ``storage_options`` for this server.
        filer: Address of the part that mounts connect to.
        pid: Id of its process.
    """

    def __init__(self, weed: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weed-")
        root = Path(self._folder.name)
        (root / "data").mkdir()
        credentials = [{"accessKey": "key", "secretKey": _SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (root / "s3.json").write_text(json.dumps({"identities": [identity]}))
        # With each of these ports the server takes another one for gRPC, 10,000 above.
        s3, master, volume, filer = (free_port(10_000) for _ in range(4))
        ports = [f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
        command = [weed, "server", f"-dir={root / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", *ports]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.config={root / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=200"]
        self._log = (root / "log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=root)
        self.options = options_for(s3, "key", _SECRET)
        self.filer = f"127.0.0.1:{filer}"
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
        except BaseException:  # nobody else could end the process
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        import obstore
        from obstore.store import S3Store

        options = {key: value for key, value in self.options.items() if key != "client_options"}
        store = S3Store("checkpoints", client_options={"allow_http": True}, retry_config={"max_retries": 0}, **options)
        end = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                obstore.put(store, "ready", b"ready")  # this creates the bucket
                return
            except Exception as error:
                if time.monotonic() > end or self._process.poll() is not None:
                    self._log.seek(0)
                    raise AssertionError(f"SeaweedFS does not start: {error}\n{self._log.read()[-3000:]}") from error
                time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()
