# SPDX-License-Identifier: Apache-2.0
"""A child process that saves and loads with one build of the package, as often as the parent asks.

Two builds cannot be imported into one process. The child lives through all rounds, so both builds are equally warm.
Parent and child exchange lines of JSON. Run as a script, this file is the child.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any


class BuildProcess:
    """The parent's side.

    Args:
        build: Directory that holds the package. None for the installed one.
        kind: Kind of the state to save and load.
        gigabytes: Its size. None for the kind's own size.

    Raises:
        RuntimeError: The child has ended, or imported another build.
    """

    def __init__(self, build: Path | None, kind: str, gigabytes: float | None) -> None:
        environment = dict(os.environ)
        if build is not None:
            environment["PYTHONPATH"] = str(build.resolve())
        command = [sys.executable, __file__, kind, json.dumps(gigabytes)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        hello = self._receive()
        self.description: str = hello["state"]
        if build is not None and Path(hello["build"]) != build.resolve():
            raise RuntimeError(f"the package was imported from {hello['build']}, wanted {build}")

    def prepare(self, action: str, path: Path, verify: bool) -> None:
        """Prepares one ``save`` to ``path``, or one ``load`` from it into blank tensors."""
        self._ask(do="prepare", action=action, path=str(path), verify=verify)

    def go(self) -> dict[str, float]:
        """Runs the prepared action. Returns its ``wall_s``, and the ``cpu_s`` of all threads."""
        return self._ask(do="go")

    def check(self) -> None:
        """Compares the state byte by byte with its original content."""
        self._ask(do="check")

    def refuses(self, path: Path) -> bool:
        """Whether this build finds the checkpoint at ``path`` corrupt."""
        return bool(self._ask(do="refuse", path=str(path))["refused"])

    def close(self) -> None:
        self._child.communicate()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the child has ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(kind: str, gigabytes: float | None) -> None:
    """The child's side: answers requests until there are none."""
    import torch.distributed.checkpoint as dcp

    import bytecheckpoint
    from bytecheckpoint.errors import CorruptCheckpointError
    from measurement.states import make_state

    state = make_state(kind, gigabytes)

    def perform(action: str, path: str, verify: bool) -> dict[str, float]:
        config = bytecheckpoint.Config(verify=verify)
        wall, cpu = time.perf_counter(), time.process_time()
        if action == "save":
            dcp.save(state.tree, storage_writer=bytecheckpoint.BcpWriter(path, config=config), no_dist=True)
        else:
            dcp.load(state.tree, storage_reader=bytecheckpoint.BcpReader(path, config=config), no_dist=True)
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    def refused(path: str) -> bool:
        try:
            bytecheckpoint.BcpReader(path).read_metadata()
        except CorruptCheckpointError:
            return True
        return False

    prepared: dict[str, Any] = {}
    build = Path(bytecheckpoint.__file__).resolve().parents[1]
    print(json.dumps({"build": str(build), "state": state.description}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        match request.pop("do"):
            case "prepare":
                prepared = request
                if prepared["action"] == "load":
                    state.blank()
                gc.collect()
            case "go":
                answer = perform(**prepared)
            case "check":
                state.check()
            case "refuse":
                answer = {"refused": refused(request["path"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the scripts' folder, as when a script runs
    warnings.filterwarnings("ignore")
    serve(sys.argv[1], json.loads(sys.argv[2]))
