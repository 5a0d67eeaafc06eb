# SPDX-License-Identifier: Apache-2.0
"""Runs commands one after another, each within a limit, and keeps what they gave in one JSON file.

The file is replaced as a whole before and after each step, so whoever is stopped in the middle leaves what was done.
This module needs the standard library alone, because its steps may be what builds and installs everything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Run", "Step", "last_line"]

TAIL_CHARACTERS = 4000
PROGRESS_S = 20.0
# A step that is stopped first gets Ctrl-C, so that Python says where it was.
GRACE_S = 3.0
LEAST_S = 3.0
"""A step is not started with less time than this."""


@dataclass(frozen=True)
class Outcome:
    """What a step gave.

    Attributes:
        status: ``ok``, ``failed``, ``stopped`` (at its limit), ``left out`` or ``not started``.
        why: What is said about it, where it is not ``ok``.
        figures: What was read from it; None if it has no result.
    """

    status: str
    why: str = ""
    figures: Any = None


def exit_status_decides(code: int | None, output: str, figures: Any) -> Outcome:
    """Judges a step by its exit status. None is a step that was stopped at its limit."""
    if code is None:
        return Outcome("stopped", "it was stopped at its limit", figures)
    if code:
        return Outcome("failed", f"exit status {code}: {last_line(output)}", figures)
    return Outcome("ok", figures=figures)


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        limit_s: After that it is stopped, with all processes of its group.
        needs: Steps that must be ``ok``, else this one is not started.
        json_file: A file that the command writes; its content is what it found, also if it was stopped.
        judge: Makes an outcome of exit status (None: stopped), output and content of ``json_file``.
        group: Steps of one group share the limit of the group.
        after: An earlier step, and how many times as long as that one this one takes. If that is more time than there
            is, it is left out.
        is_optional: Whether a run is complete without its result.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()
    json_file: Path | None = None
    judge: Callable[[int | None, str, Any], Outcome] = exit_status_decides
    group: str = ""
    after: tuple[str, float] | None = None
    is_optional: bool = False


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it wrote nothing"


class Run:
    """Runs steps, and keeps what they gave in ``folder/report.json``, and all that they wrote in ``folder/output.log``.

    Args:
        limit_s: For all steps together, from now on.
        group_limits_s: For all steps of a group together.
        facts: What else stands in the report.
        variables: The environment of the steps.
        words_for: Shorter texts for what stands in commands and output, such as paths of this machine.
    """

    def __init__(
        self,
        folder: Path,
        limit_s: float,
        group_limits_s: Mapping[str, float],
        facts: Mapping[str, Any],
        variables: Mapping[str, str],
        words_for: Mapping[str, str],
        say: Callable[[str], None] = print,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "report.json"
        self._log = folder / "output.log"
        self._log.write_bytes(b"")
        self._begin = time.monotonic()
        self._limit_s = limit_s
        self._left_s = dict(group_limits_s)
        self._variables = {**os.environ, **variables}
        self._words_for = words_for
        self._say = say
        self.report: dict[str, Any] = {**facts, "limit_s": limit_s, "seconds": 0.0, "steps": []}
        self._write()

    def leave_out(self, name: str, why: str) -> None:
        self.report["steps"].append({"name": name, "status": "left out", "why": why, "is_optional": True})
        self._tell(f"{name}: left out, {why}")
        self._write()

    def run(self, step: Step) -> None:
        """Runs one step, or says why not, and writes the report."""
        entry: dict[str, Any] = {"name": step.name, "command": self._shorten(" ".join(step.command))}
        entry |= {"limit_s": step.limit_s, "status": "running", "is_optional": step.is_optional}
        self.report["steps"].append(entry)
        most_s = min(step.limit_s, self._limit_s - self._elapsed_s(), self._left_s.get(step.group, step.limit_s))
        refusal = self._refusal(step, most_s)
        if refusal is not None:
            entry |= {"status": refusal.status, "why": refusal.why}
            self._tell(f"{step.name}: {refusal.status}, {refusal.why}")
        else:
            self._write()
            self._tell(f"{step.name}, at most {most_s:.0f} s: {entry['command']}")
            if step.json_file is not None:
                step.json_file.unlink(missing_ok=True)
            begin = time.monotonic()
            code, output = self._call(step, most_s)
            seconds = time.monotonic() - begin
            if step.group in self._left_s:
                self._left_s[step.group] -= seconds
            outcome = step.judge(code, output, _content(step.json_file))
            entry |= {"status": outcome.status, "why": self._shorten(outcome.why), "exit_status": code}
            entry |= {"seconds": round(seconds, 1), "figures": outcome.figures, "tail": output[-TAIL_CHARACTERS:]}
            because = f", {entry['why']}" if entry["why"] else ""
            self._tell(f"  {outcome.status} in {seconds:.1f} s{because}")
        self._write()

    def finish(self) -> list[str]:
        """Completes the report. Returns what is missing from a whole run, a line each."""
        lines = []
        for entry in self.report["steps"]:
            has_result = entry["status"] == "ok" or (entry["status"] == "stopped" and entry.get("figures"))
            if not has_result and not (entry["status"] == "left out" or entry["is_optional"]):
                lines.append(f"{entry['name']}: {entry['status']}, {entry['why'] or 'it has no result'}")
        self.report["missing"] = lines
        self._write()
        return lines

    def _refusal(self, step: Step, most_s: float) -> Outcome | None:
        by_name = {entry["name"]: entry for entry in self.report["steps"]}
        for name in step.needs:
            if by_name[name]["status"] != "ok":
                return Outcome("not started", f"it needs '{name}'")
        if most_s < min(LEAST_S, step.limit_s):
            return Outcome("not started", "no time is left")
        if step.after is not None:
            name, factor = step.after
            before = by_name[name]
            if before["status"] != "ok":
                return Outcome("left out", f"'{name}' did not end in its time")
            if before["seconds"] * factor > most_s:
                seconds = before["seconds"] * factor
                return Outcome("left out", f"it would take about {seconds:.0f} s, and {most_s:.0f} s are left for it")
        return None

    def _call(self, step: Step, most_s: float) -> tuple[int | None, str]:
        """Returns the exit status, or None if the command was stopped, and what it wrote."""
        with self._log.open("ab") as log:
            log.write(f"==== {step.name}: {' '.join(step.command)}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self._variables, start_new_session=True,
            )  # fmt: skip
        # The process is not waited for before its group is killed: until then nobody else can get its number.
        watched = os.pidfd_open(process.pid)
        try:
            is_done = self._wait(watched, most_s, start)
            if not is_done:
                os.killpg(process.pid, signal.SIGINT)
                _ends(watched, GRACE_S)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            _wait_for_end_of(process.pid)
            os.close(watched)
            code = process.wait()
        return (code if is_done else None), self._output_since(start)

    def _output_since(self, start: int) -> str:
        return self._shorten(self._log.read_bytes()[start:].decode(errors="replace"))

    def _wait(self, watched: int, most_s: float, start: int) -> bool:
        """Waits until the process ends, and says now and then what it wrote last. Returns False after ``most_s``."""
        give_up = time.monotonic() + most_s
        while (left_s := give_up - time.monotonic()) > 0:
            if _ends(watched, min(left_s, PROGRESS_S)):
                return True
            self._tell(f"  ... {last_line(self._output_since(start))}")
        return False

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    def _tell(self, text: str) -> None:
        self._say(f"[{self._elapsed_s():4.0f} s] {text}")

    def _shorten(self, text: str) -> str:
        for words, short in self._words_for.items():
            text = text.replace(words, short)
        return text

    def _write(self) -> None:
        self.report["seconds"] = round(self._elapsed_s(), 1)
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps(self.report, indent=1) + "\n")
        beside.replace(self.file)


def _ends(watched: int, most_s: float) -> bool:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    return bool(poll.poll(most_s * 1000))


def _wait_for_end_of(group: int) -> None:
    """Waits until nothing of a killed process group runs, for ``GRACE_S`` at most: it would disturb the next step."""
    give_up = time.monotonic() + GRACE_S
    while _runs(group) and time.monotonic() < give_up:
        time.sleep(0.01)


def _runs(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                return True
    return False


def _content(file: Path | None) -> Any:
    """Returns what a step has written; None if it wrote nothing, or was stopped while it wrote."""
    if file is None:
        return None
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
