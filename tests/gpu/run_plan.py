# SPDX-License-Identifier: Apache-2.0
"""The steps of ``run.py``, on a device and in a rehearsal without one."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.timed_steps import Outcome, Step, last_line

TESTS = "tests"
GROUP_LIMITS_S = {TESTS: 220.0}

_DONE = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/\S+::.*?) *$", re.MULTILINE)
_SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] [^ ]+ (.*)$", re.MULTILINE)
_NOT_FATAL = ("PASSED", "SKIPPED", "XFAIL")


def judge_tests(code: int | None, output: str, _: Any) -> Outcome:
    """Reads the verbose output of pytest, whole or cut off. A file whose tests did not all end has failed."""
    done = dict(_DONE.findall(output))
    counts = {word.lower(): list(done.values()).count(word) for word in sorted(set(done.values()))}
    reasons = sorted({reason for _, reason in _SKIPPED.findall(output)})
    figures = {"counts": counts, "not passed": [name for name, word in done.items() if word not in _NOT_FATAL]}
    figures["skipped because"] = reasons
    if figures["not passed"]:
        return Outcome("failed", ", ".join(figures["not passed"]), figures)
    if code is None:
        begun = [line for line in _BEGUN.findall(output) if not _DONE.match(line)]
        where = begun[-1] if begun else "what pytest does around tests"
        return Outcome("failed", f"stopped at its limit in {where}, after {len(done)} tests", figures)
    if not counts.get("passed") and reasons and code in (0, 5):  # 5: the whole module was skipped
        return Outcome("left out", "; ".join(reasons), figures)
    if code or not counts.get("passed"):
        return Outcome("failed", f"exit status {code}: {last_line(output)}", figures)
    return Outcome("ok", figures=figures)


@dataclass(frozen=True)
class Scale:
    """Sizes and limits: those of a device, and those of a rehearsal, whose figures mean nothing."""

    device: str
    limit_factor: float
    build_limit_s: float
    mixed_gigabytes: tuple[float, ...]
    sizes_of_stall: tuple[str, ...]
    gigabytes: str
    conditions: tuple[str, ...]


ON_DEVICE = Scale(
    device="cuda",
    limit_factor=1.0,
    build_limit_s=170.0,
    mixed_gigabytes=(1.0, 4.0, 10.0),
    sizes_of_stall=("--repetitions", "3"),
    gigabytes="1",
    conditions=("--repetitions", "3", "--idle-limit-s", "2"),
)
REHEARSED = Scale(
    device="cpu",
    limit_factor=4.0,
    build_limit_s=1800.0,
    mixed_gigabytes=(0.01, 0.04, 0.1),
    sizes_of_stall=(
        *("--repetitions", "1", "--tensors", "100", "--small-tensors", "200", "--small-gigabytes", "0.003"),
        *("--large-tensors", "4", "--large-gigabytes", "0.05"),
    ),
    gigabytes="0.05",
    conditions=("--repetitions", "1", "--idle-limit-s", "0", "--warm-gib", "0"),
)


@dataclass(frozen=True)
class Plan:
    """Makes the steps in their order: what is new is tested before anything is measured.

    Args:
        scratch: A folder for files of the steps.
    """

    scale: Scale
    scratch: Path

    def build_steps(self) -> list[Step]:
        build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
        found = self.scratch / "machine.json"
        look = [sys.executable, "tests/gpu/run_machine.py", "--json", str(found)]
        if self.scale is ON_DEVICE:
            look.append("--needs-device")
        return [
            Step("build", build, self.scale.build_limit_s),
            Step("machine", look, self._limit_s(30.0), needs=("build",), json_file=found),
        ]

    def stand_in_steps(self) -> list[Step]:
        make = ("make", "-f", "tests/cuda/build.mk", "VARIANT=plain", "test_cuda")
        return [Step("stand-in for the CUDA runtime", make, 1800.0)]

    def test_steps(self, tests: Sequence[str]) -> list[Step]:
        pytest = (sys.executable, "-m", "pytest", "-v", "-ra", "--color=no", "-p", "no:cacheprovider", "--durations=5")
        options = ("-o", "console_output_style=classic")
        return [
            Step(name, (*pytest, *options, name), self._limit_s(90.0), ("machine",), judge=judge_tests, group=TESTS)
            for name in tests
        ]

    def benchmark_steps(self) -> list[Step]:
        device = ("--device", self.scale.device)
        only = ("--only", "dcp-2,bytecheckpoint,bytecheckpoint-planners,disk")
        of_size = (*device, "--gigabytes", self.scale.gigabytes, *self.scale.conditions, "--dir", str(self.scratch))
        first, *others = self.scale.mixed_gigabytes
        steps = [
            self._stall("small", 60.0),
            self._stall("mixed", 60.0, first),
            self._stall("large", 60.0),
            self._benchmark("save and load", 75.0, "compare.py", "large", *of_size, *only),
            self._benchmark("load of safetensors", 75.0, "load_hf.py", "--ranks", "1", *of_size),
        ]
        for before, size in zip((first, *others), others, strict=False):
            after = (_name_of_stall("mixed", before), 0.9 * size / before)
            steps.append(self._stall("mixed", 30.0 * size / first, size, after=after, is_optional=True))
        return steps

    def _stall(self, kind: str, limit_s: float, gigabytes: float | None = None, **more: Any) -> Step:
        size = () if gigabytes is None else ("--gigabytes", str(gigabytes))
        arguments = (kind, "--device", self.scale.device, *self.scale.sizes_of_stall, *size)
        return self._benchmark(_name_of_stall(kind, gigabytes), limit_s, "gpu_stall.py", *arguments, **more)

    def _benchmark(self, name: str, limit_s: float, script: str, *arguments: str, **more: Any) -> Step:
        file = self.scratch / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
        command = (sys.executable, f"benchmarks/{script}", *arguments, "--json", str(file))
        return Step(name, command, self._limit_s(limit_s), ("machine",), json_file=file, **more)

    def _limit_s(self, limit_s: float) -> float:
        return self.scale.limit_factor * limit_s


def _name_of_stall(kind: str, gigabytes: float | None) -> str:
    return f"stall, {kind}" if gigabytes is None else f"stall, {kind} of {gigabytes:g} GB"
