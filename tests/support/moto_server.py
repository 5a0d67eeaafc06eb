# SPDX-License-Identifier: Apache-2.0
"""Runs moto's stand-in for S3 on this machine, which has what SeaweedFS lacks: versions, Object Lock, and so on."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from typing import Any

from support.ports import free_port

__all__ = ["MotoServer"]

_START_LIMIT_S = 60.0


class MotoServer:
    """A new server without buckets, on a free loopback port.

    Attributes:
        options: The ``storage_options`` for this server.
    """

    def __init__(self) -> None:
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.options: dict[str, Any] = {
            "endpoint": f"http://127.0.0.1:{port}",
            "access_key_id": "key",
            "secret_access_key": "not-to-be-told",
            "region": "us-east-1",
            "client_options": {"pool_max_idle_per_host": "0"},  # no connection outlives a test
        }
        end = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                self.ask("GET", "/moto-api/data.json")
                return
            except OSError as error:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise AssertionError(f"moto does not start: {error}") from error
                time.sleep(0.1)

    def ask(self, method: str, target: str, body: str = "", headers: dict[str, str] | None = None) -> str:
        """Makes one request of S3, and returns the body of its reply."""
        scope = "Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {scope}", "Content-Type": "application/xml", **(headers or {})}
        request = urllib.request.Request(
            f"{self.options['endpoint']}{target}", method=method, data=body.encode() or None, headers=headers
        )
        with urllib.request.urlopen(request) as reply:
            text: str = reply.read().decode()
        return text

    def keys(self, bucket: str) -> list[str]:
        """Returns the keys in a bucket."""
        return [part.partition("</Key>")[0] for part in self.ask("GET", f"/{bucket}").split("<Key>")[1:]]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
