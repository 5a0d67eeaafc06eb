# SPDX-License-Identifier: Apache-2.0
"""Runs a real object store on this machine: SeaweedFS, from its package, on free loopback ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from support.ports import free_port
from support.server_processes import options_for

__all__ = ["SeaweedFS", "find_weed"]

_START_LIMIT_S = 60.0
_SECRET = "not-to-be-told"
# Ends when the server has taken an object, which makes the bucket. A process of its own: it may be in another network.
_PUT = """
    import json, sys, time
    import obstore
    from obstore.store import S3Store
    options, end = json.loads(sys.argv[1]), time.monotonic() + float(sys.argv[2])
    options["client_options"] = {"allow_http": True}
    store = S3Store("checkpoints", retry_config={"max_retries": 0}, **options)
    while True:
        try:
            obstore.put(store, "ready", b"ready")
            break
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
"""


def find_weed() -> str | None:
    """Returns the path of its program; None if the package is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


class SeaweedFS:
    """A new server, which speaks S3 and has the bucket ``checkpoints``.

    Args:
        weed: Path of its program.
        address: Where it listens.
        inside: What comes before a command that is to run in the network of that address.

    Attributes:
        options: The ``storage_options`` for this server.
        filer: Address of the part that mounts connect to.
        pid: Id of its process.
    """

    def __init__(self, weed: str, address: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weed-")
        root = Path(self._folder.name)
        (root / "data").mkdir()
        credentials = [{"accessKey": "key", "secretKey": _SECRET}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (root / "s3.json").write_text(json.dumps({"identities": [identity]}))
        # With each of these ports the server takes another one for gRPC, 10,000 above.
        s3, master, volume, filer = (free_port(10_000) for _ in range(4))
        ports = [f"-s3.port={s3}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
        command = [*inside, weed, "server", f"-dir={root / 'data'}", f"-ip={address}", f"-ip.bind={address}", "-s3"]
        command += [*ports, "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.config={root / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=200"]
        self._log = (root / "log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=root)
        self.options = {**options_for(s3, "key", _SECRET), "endpoint": f"http://{address}:{s3}"}
        self.filer = f"{address}:{filer}"
        self.pid = self._process.pid
        try:
            self._wait_until_ready(inside)
        except BaseException:  # nobody else could end the process
            self.close()
            raise

    def _wait_until_ready(self, inside: Sequence[str]) -> None:
        arguments = json.dumps(self.options), str(_START_LIMIT_S)
        putting = subprocess.Popen(
            [*inside, sys.executable, "-c", textwrap.dedent(_PUT), *arguments], stderr=subprocess.PIPE, text=True
        )
        while putting.poll() is None:
            if self._process.poll() is not None:
                putting.kill()
            time.sleep(0.05)
        error = putting.communicate()[1]
        if putting.returncode:
            self._log.seek(0)
            raise AssertionError(f"SeaweedFS does not start: {error}\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()
