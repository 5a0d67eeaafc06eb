# SPDX-License-Identifier: Apache-2.0
"""Includes point down, foreign headers stay where they belong, every file says its licence, importing does nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LICENCE = "SPDX-License-Identifier: Apache-2.0"

# What a folder of csrc may include besides itself.
MAY_INCLUDE = {
    "base": set(),
    "tensor": {"base"},
    "format": {"base", "tensor"},
    "planner": {"base", "tensor"},
    "staging": {"base", "tensor"},
    "io": {"base"},
    "engine": {"base", "tensor", "format", "planner", "staging", "io"},
    "bridge": {"base", "tensor", "format", "planner", "staging", "io", "engine"},
    "bindings": {"base", "tensor", "format", "planner", "staging", "io", "engine", "bridge"},
    "testing": {"base", "tensor", "format", "planner", "staging", "io", "engine", "bridge"},
}
# What a subfolder of a layer may include of its layer, besides itself and the files of the layer that are in no
# subfolder. Those files may include no subfolder.
SUBFOLDERS = {
    "format": {
        "archive": set(),
        "pickle": set(),
        "manifest": {"pickle"},
        "torch": {"archive", "pickle", "manifest"},
        "dcp": {"archive", "pickle", "manifest", "torch"},
        "json": set(),
        "safetensors": {"json", "manifest"},
        "orbax": {"json"},
    },
    "engine": {
        "open": set(),
        "commit": {"open"},
        "save": {"open"},
        "load": {"open"},
        "check": {"open", "commit"},
        "export": {"save", "load", "check"},
        "copy": {"open", "check"},
    },
}
INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)[ \t]*([<\"])([^>\"]+)[>\"]", re.MULTILINE)
ANY_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)\b", re.MULTILINE)
PYTHON_OR_TORCH = re.compile(r"^(torch|ATen|c10|pybind11|caffe2)/|^(Python|structmember|frameobject)\.h$|^torch\.h$")
CUDA = re.compile(r"^(cuda|cub|thrust|nv|driver_types|device_launch|cooperative_groups|vector_types)")
# Layers without threads, whose tests do not run under TSan (tests/cpp/build.mk).
WITHOUT_THREADS = ("tensor", "format", "planner")
KNOWS_THREADS = re.compile(
    r"csrc/base/(?:named_thread|mutex|bounded_queue|per_process)\.h|atomic|condition_variable|future|mutex|shared_mutex|thread"
)
# Calls that change files. Only io may: the journal that power loss is simulated with is kept there. Staging's are of
# memory.
CHANGES_FILES = re.compile(
    r"(?<!\w)::(?:rename(?:at2?)?|link(?:at)?|unlink(?:at)?|mkdir(?:at)?|rmdir|symlink(?:at)?|pwrite|write|ftruncate"
    r"|truncate|fallocate|fsync|fdatasync)\("
)
# Threads that begin without a name, which tests for leaks would not see.
BEGINS_THREAD = re.compile(r"std::thread(?: \w+)?[({](?!std::move|\))|\bthreads?_?\.emplace_back\(|\bpthread_create\(")
# Ways to and from the GIL by which a daemon thread aborts the process at the end of the interpreter.
MOVES_GIL = re.compile(r"\bgil_scoped_|\bPyGILState_|\bPyEval_(?:Save|Restore)Thread\b|\bPy_BEGIN_ALLOW_THREADS\b")
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".mk", ".sh"}
SOURCE_FOLDERS = ("csrc", "bytecheckpoint", "tests", "demo", "benchmarks", "tools")


def folders_of(path: str) -> tuple[str, str]:
    """The layer of a file of csrc, and the folder in the layer; that is "" for a file directly in the layer."""
    layer, *folders = path.split("/")[1:-1] or [""]
    return layer, "/".join(folders)


def may_include(path: str, header: str) -> bool:
    """Whether one file of csrc may include another, as far as their folders are concerned."""
    layer, folder = folders_of(path)
    target, target_folder = folders_of(header)
    if target != layer:
        return target in MAY_INCLUDE[layer]
    return target_folder in ("", folder) or target_folder in SUBFOLDERS.get(layer, {}).get(folder, set())


def faults_of_source(path: str, content: str) -> list[str]:
    """What is wrong with one file of csrc. ``path`` is relative to the repository and uses ``/``."""
    (layer, folder), name = folders_of(path), path.split("/")[-1]
    if layer not in MAY_INCLUDE:
        return [f"{path}: folder {layer} is no layer; add it to MAY_INCLUDE and to csrc/README.md"]
    if folder and folder not in SUBFOLDERS.get(layer, {}):
        return [f"{path}: {layer} has no folder {folder}; add it to SUBFOLDERS and to csrc/README.md"]
    faults = []
    sees_gpu = name.endswith((".cu", ".cuh")) or name.startswith("cuda_")
    includes = INCLUDE.findall(content)
    if len(includes) != len(ANY_INCLUDE.findall(content)):
        faults.append(f"{path}: an include that this check cannot read")
    for quote, header in includes:
        if header.startswith("csrc/"):
            if not may_include(path, header):
                faults.append(f'{path}: {"/".join(filter(None, (layer, folder)))} may not include "{header}"')
        elif quote == '"':
            faults.append(f'{path}: "{header}" does not start with csrc/')
        if layer in WITHOUT_THREADS and KNOWS_THREADS.fullmatch(header):
            faults.append(f"{path}: {layer} knows no threads, so it may not include {header}")
        if PYTHON_OR_TORCH.match(header) and layer not in ("bridge", "bindings", "testing"):
            faults.append(f"{path}: only what Python calls may include <{header}>")
        own_cuda = header.startswith("csrc/") and header.split("/")[-1].startswith("cuda_")
        if (CUDA.match(header.split("/")[0]) or own_cuda) and not sees_gpu:
            faults.append(f"{path}: only *.cu and cuda_* may include <{header}>")
    if layer not in ("io", "staging") and CHANGES_FILES.search(content):
        faults.append(f"{path}: only io changes files")
    if path != "csrc/base/named_thread.h" and BEGINS_THREAD.search(content):
        faults.append(f"{path}: a thread without a name; base/named_thread.h gives it one")
    if path != "csrc/bridge/gil.h" and MOVES_GIL.search(content):
        faults.append(f"{path}: the GIL is let go of and taken by the guards of bridge/gil.h")
    if path.endswith((".h", ".cuh")) and "#pragma once" not in content.splitlines():
        faults.append(f"{path}: no #pragma once")
    return faults


def faults_of_licence(path: str, content: str) -> list[str]:
    """The licence stands in the first line, behind a shebang at most. An empty file has nothing to license."""
    lines = content.splitlines()
    if lines and lines[0].startswith("#!"):
        del lines[0]
    first = lines[0].strip() if lines else ""
    if content and first not in (f"// {LICENCE}", f"# {LICENCE}"):
        return [f"{path}: does not begin with '{LICENCE}'"]
    return []


def files_under(folder: str) -> list[Path]:
    return sorted(
        path
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts
    )


def test_includes_point_down() -> None:
    files = files_under("csrc")
    assert len(files) > 30, "csrc is not where this test looks"
    faults = [
        fault for path in files for fault in faults_of_source(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not faults, "\n".join(faults)


def test_the_map_has_every_folder_and_what_it_may_include() -> None:
    rows = re.findall(r"^\| `(\w+)/(\w*)/?` \| .+ \| (.*)\|$", (ROOT / "csrc/README.md").read_text(), re.MULTILINE)
    assert {layer for layer, folder, _ in rows if not folder} >= MAY_INCLUDE.keys()
    of_map = {(layer, folder): set(re.findall(r"\w+", included)) for layer, folder, included in rows if folder}
    assert of_map == {(layer, folder): may for layer, inner in SUBFOLDERS.items() for folder, may in inner.items()}


def test_every_source_file_begins_with_its_licence() -> None:
    files = [path for folder in SOURCE_FOLDERS for path in files_under(folder)]
    faults = [
        fault for path in files for fault in faults_of_licence(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("csrc/base/a.cpp", '#include "csrc/tensor/box.h"'),
        ("csrc/tensor/a.cpp", '#include "csrc/format/tree.h"'),
        ("csrc/planner/a.cpp", '#include "csrc/format/tree.h"'),
        ("csrc/format/a.cpp", '#include "csrc/staging/arena.h"'),
        ("csrc/staging/a.cpp", '#include "csrc/planner/load_plan.h"'),
        ("csrc/staging/a.cpp", '#include "csrc/io/file.h"'),
        ("csrc/io/a.cpp", '#include "csrc/tensor/box.h"'),
        ("csrc/io/a.cpp", '#  include "csrc/engine/commit/commit.h"'),
        ("csrc/engine/a.cpp", '#include "csrc/bridge/errors.h"'),
        ("csrc/engine/a.cpp", "#include <torch/extension.h>"),
        ("csrc/engine/a.cpp", "#include <pybind11/pybind11.h>"),
        ("csrc/engine/a.cpp", "#include <ATen/ATen.h>"),
        ("csrc/format/a.cpp", "#include <Python.h>"),
        ("csrc/staging/a.cpp", "#include <cuda_runtime.h>"),
        ("csrc/bindings/a.cpp", "#include <cuda.h>"),
        ("csrc/bindings/a.cpp", "#include <cub/cub.cuh>"),
        ("csrc/staging/device_merge.h", '#pragma once\n#include "csrc/staging/cuda_handles.h"'),
        ("csrc/base/a.cpp", '#include "bytes.h"'),
        ("csrc/base/a.cpp", "#include HEADER"),
        ("csrc/planner/a.cpp", '#include "csrc/base/named_thread.h"'),
        ("csrc/format/a.cpp", "#include <mutex>"),
        ("csrc/other/a.cpp", ""),
        ("csrc/a.cpp", ""),
        ("csrc/format/other/a.cpp", ""),
        ("csrc/format/torch/deeper/a.cpp", ""),
        ("csrc/base/other/a.cpp", ""),
        ("csrc/format/tree.cpp", '#include "csrc/format/pickle/pickle_tree.h"'),
        ("csrc/format/pickle/a.cpp", '#include "csrc/format/torch/torch_file.h"'),
        ("csrc/engine/save/a.cpp", '#include "csrc/engine/load/load_job.h"'),
        ("csrc/base/a.h", ""),
        ("csrc/engine/a.cpp", "const int result = ::renameat2(a, from, b, to, 0);"),
        ("csrc/bindings/a.cpp", "::fsync(fd);"),
        ("csrc/io/a.cpp", "std::thread([&] { run(); }).detach();"),
        ("csrc/io/a.cpp", "threads_.emplace_back([this] { run(); });"),
        ("csrc/bindings/a.cpp", "const py::gil_scoped_acquire locked;"),
        ("csrc/bindings/a.cpp", "m.def(name, &call, py::call_guard<py::gil_scoped_release>());"),
    ],
)
def test_a_violation_is_found(path: str, line: str) -> None:
    assert len(faults_of_source(path, f"// {LICENCE}\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("csrc/base/a.h", "#pragma once\n#include <mutex>\n"),
        ("csrc/engine/a.cpp", '#include "csrc/io/file.h"\n#include "csrc/format/tree.h"\n'),
        ("csrc/engine/save/a.cpp", '#include "csrc/engine/names.h"\n#include "csrc/engine/save/save_job.h"\n'),
        ("csrc/engine/check/a.cpp", '#include "csrc/engine/commit/lock_file.h"\n'),
        ("csrc/engine/save/a.cpp", '#include "csrc/format/manifest/manifest.h"\n'),
        ("csrc/bindings/a.cpp", '#include <torch/extension.h>\n#include "csrc/engine/commit/commit.h"\n'),
        ("csrc/engine/a.cpp", "return io::rename(from, to);"),
        ("csrc/io/a.cpp", "::fsync(fd);"),
        ("csrc/io/a.cpp", 'threads_.push_back(base::named_thread("bcp-a", run));'),
        ("csrc/bindings/a.cpp", "const WithoutGil no_gil;"),
        ("csrc/staging/cuda_device.cpp", "#include <cuda_runtime.h>\n"),
        ("csrc/staging/merge.cu", "#include <cuda_runtime.h>\n"),
        ("csrc/staging/merge.cu", '#include "csrc/staging/cuda_handles.h"\n'),
    ],
)
def test_what_is_allowed_is_not_a_violation(path: str, content: str) -> None:
    assert faults_of_source(path, content) == []


@pytest.mark.parametrize(
    ("content", "is_fine"),
    [
        (f"// {LICENCE}\n#pragma once\n", True),
        (f"#!/usr/bin/env python3\n# {LICENCE}\n", True),
        ("", True),
        ("#pragma once\n", False),
        (f"\n# {LICENCE}\n", False),
        (f'"""Docs."""\n# {LICENCE}\n', False),
        ("# SPDX-License-Identifier: MIT\n", False),
    ],
)
def test_a_missing_licence_is_found(content: str, is_fine: bool) -> None:
    assert (faults_of_licence("a.py", content) == []) == is_fine


def test_every_package_is_installed() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "bytecheckpoint").rglob("__init__.py")}
    assert set(named) == there


# Runs in a new interpreter. The package's own look at the environment would go through os.environ's mapping.
IMPORT_PROBE = """
import os, sys, threading
read = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)
    def __iter__(self):
        read.append("*")
        return super().__iter__()
os.environ.__class__ = Watched
os.getenv("BCP_LINT_CONTROL")
assert read.pop() == "BCP_LINT_CONTROL" and not read
before = set(sys.modules)
{statement}
unwanted = [m for m in sys.modules if m.startswith(("torch.", "bytecheckpoint._core", "bytecheckpoint._C"))]
print(sorted(unwanted), sorted(read), threading.active_count())
"""


def probe(statement: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE.format(statement=statement)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "module", ["bytecheckpoint", "bytecheckpoint.config", "bytecheckpoint.errors", "bytecheckpoint.report"]
)
def test_importing_does_nothing(module: str) -> None:
    assert probe(f"import {module}; dir({module})") == "[] [] 1"


def test_the_probe_sees_what_an_import_would_do() -> None:
    assert probe("os.environ['HOME']; list(os.environ)") == "[] ['*', 'HOME'] 1"
    assert probe("import bytecheckpoint._core").startswith("['bytecheckpoint._core']")
