# SPDX-License-Identifier: Apache-2.0
"""The processes of a real store on this machine, which a test starts, waits for, and ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ServerProcesses", "options_for", "wait_for_bucket"]

_START_LIMIT_S = 180.0
_BUCKET = "checkpoints"


class ServerProcesses:
    """Processes that write to one log.

    Args:
        log: File for what they say.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> None:
        """Starts a process, which stays in the foreground."""
        with self._log.open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self._log.parent))

    def wait(self, try_it: Callable[[], None]) -> None:
        """Calls ``try_it`` until it raises nothing.

        Raises:
            AssertionError: A process has ended, or nothing worked for minutes.
        """
        end = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                try_it()
                return
            except Exception as error:
                ended = [process.args for process in self._processes if process.poll() is not None]
                if time.monotonic() > end or ended:
                    said = self._log.read_text(errors="replace")[-3000:]
                    raise AssertionError(f"the store does not start: {ended or error}\n{said}") from error
                time.sleep(0.2)

    def close(self) -> None:
        """Ends the processes, those that were started last first."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()


def options_for(port: int, access_key_id: str, secret: str) -> dict[str, Any]:
    """Returns the ``storage_options`` for a store that speaks S3 at ``port``."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": access_key_id,
        "secret_access_key": secret,
        "region": "us-east-1",
        "client_options": {"pool_max_idle_per_host": "0"},  # no connection outlives a test
    }


def wait_for_bucket(options: Mapping[str, Any], processes: ServerProcesses) -> None:
    """Makes the bucket ``checkpoints`` as soon as the store lets it be made, with boto3.

    Raises:
        AssertionError: The store does not start.
    """
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        region_name=options["region"],
        config=Config(retries={"max_attempts": 0}),
    )
    processes.wait(lambda: client.create_bucket(Bucket=_BUCKET) and None)
