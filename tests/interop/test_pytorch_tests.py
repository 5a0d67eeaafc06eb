# SPDX-License-Identifier: Apache-2.0
"""Tests the script that runs PyTorch's own tests: what it fetches and what it reports. The long form runs them all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interop.pytorch_sources import FOLDER, SourcesError, fetch_tests
from interop.pytorch_tests import NO_SOURCES, Listed, Outcome, compare, read_table, run_file

SCRIPT = Path(__file__).with_name("pytorch_tests.py")
VERSION = torch.__version__.partition("+")[0]

# A file like those of PyTorch's tests, but without their imports.
TESTS = """
import os, tempfile, unittest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.multiprocessing import get_context


def name_of_writer(queue):
    queue.put(FileSystemWriter.__name__)


class TestAll(unittest.TestCase):
    def test_save_and_load(self):
        with tempfile.TemporaryDirectory() as path:
            dcp.save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(path), planner=DefaultSavePlanner())
            state = {"a": torch.zeros(2)}
            dcp.load(state, storage_reader=FileSystemReader(path))
            self.assertTrue(state["a"].all())

    def test_extensions_are_taken(self):
        FileSystemWriter("path", _extensions=[object()])

    def test_format_by_default(self):
        with tempfile.TemporaryDirectory() as path:
            dcp.save({"a": torch.ones(2)}, checkpoint_id=path)
            self.assertIn("__0_0.distcp", os.listdir(path))

    def test_same_classes_in_other_processes(self):
        context = get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=name_of_writer, args=(queue,))
        process.start()
        self.assertEqual(queue.get(), FileSystemWriter.__name__)
        process.join()

    def test_fails_anyway(self):
        self.fail()

    @unittest.skip("no GPU")
    def test_skipped(self):
        pass
"""
# A test that asks for GPUs, with FSDP, which looks for one.
TESTS_OF_GPUS = """
import time
import unittest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu


class TestGpus(unittest.TestCase):
    @skip_if_lt_x_gpu(2)
    def test_fsdp(self):
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        model = FSDP(torch.nn.Linear(2, 2).cuda())
        model(torch.ones(2).cuda()).sum().backward()
        dist.destroy_process_group()
        time.sleep(1)  # threads of gloo may still drop tensors, and a process that ends meanwhile aborts
"""
DIFFERENCES = """
[[difference]]
file = "sub/test_all.py"
tests = ["TestAll.test_extensions_*"]
modes = ["classes"]
reason = "extensions"

[[difference]]
file = "sub/test_all.py"
tests = ["TestAll.test_format_by_default"]
modes = ["classes", "register"]
reason = "names of files"
"""


def git(*arguments: str, at: Path) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=at, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """Returns the URL of a repository with the layout of PyTorch's, and a tag for the installed version."""
    root = tmp_path / "pytorch"
    (root / FOLDER / "sub").mkdir(parents=True)
    (root / "torch").mkdir()
    (root / FOLDER / "sub" / "test_all.py").write_text(TESTS)
    (root / "torch" / "large.py").write_text("")
    git("init", "-q", at=root)
    git("config", "uploadpack.allowFilter", "true", at=root)
    git("add", ".", at=root)
    git("commit", "-qm", "x", at=root)
    git("tag", f"v{VERSION}", at=root)
    return root.as_uri()


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    packages = cache / "packages"
    for name in ("expecttest", "zstandard"):  # nothing here needs them
        (packages / name).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(SCRIPT), "--cache", str(cache), *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)


def test_only_the_folder_of_the_release_is_fetched_once(repository: str, tmp_path: Path) -> None:
    tests = fetch_tests(VERSION, tmp_path / "cache", repository)
    assert [path.name for path in tests.rglob("*.py")] == ["test_all.py"]
    assert not (tests.parents[2] / "torch").exists()
    assert fetch_tests(VERSION, tmp_path / "cache", "file:///nowhere") == tests


def test_a_release_that_is_not_there(repository: str, tmp_path: Path) -> None:
    with pytest.raises(SourcesError, match=r"v0\.0\.1"):
        fetch_tests("0.0.1", tmp_path / "cache", repository)
    assert not list((tmp_path / "cache").iterdir())


def test_without_sources_it_says_so_and_exits_with_a_status_of_its_own(tmp_path: Path) -> None:
    done = run("--repository", "file:///nowhere", cache=tmp_path)
    assert done.returncode == NO_SOURCES
    assert done.stderr.startswith(f"SKIPPED: PyTorch's tests of {VERSION} cannot be had here: ")
    done = run("--source", str(tmp_path), cache=tmp_path)
    assert (done.returncode, FOLDER in done.stderr) == (NO_SOURCES, True)


@pytest.mark.timeout(600)
def test_differences_are_found_and_listed_ones_are_known(repository: str, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text("")
    done = run("--repository", repository, "--table", str(table), cache=tmp_path / "cache")
    assert done.returncode == 1, done.stderr
    lines = [line.split(" passes with")[0] for line in done.stdout.splitlines() if line.startswith("UNLISTED: ")]
    file = "UNLISTED: sub/test_all.py::TestAll"
    assert lines == [
        f"{file}.test_extensions_are_taken (classes)",
        f"{file}.test_format_by_default (classes)",
        f"{file}.test_format_by_default (register)",
    ]
    assert "stock: 1 failed, 4 passed, 1 skipped" in done.stdout
    table.write_text(DIFFERENCES)
    done = run("--repository", "file:///nowhere", "--table", str(table), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stdout
    assert "classes: 1 error, 1 failed, 2 passed; 2 listed, 0 unlisted differences" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there: --on-cpu leaves tensors on them")
def test_on_cpu_ranks_a_test_of_gpus_runs_with_fsdp(tmp_path: Path) -> None:
    tests, packages = tmp_path / "test_gpus.py", tmp_path / "packages"
    tests.write_text(TESTS_OF_GPUS)
    packages.mkdir()
    (packages / "expecttest.py").write_text("from unittest import TestCase")  # torch.testing derives from this name
    outcomes = run_file(tests, "stock", "cpu", 120, packages)
    assert outcomes == {"TestGpus.test_fsdp": Outcome("passed"), "(process)": Outcome("passed")}


def test_a_listed_test_that_passes_after_all_is_noted() -> None:
    entry = Listed("test_a.py", ["A.*"], ["classes"], "reason")
    stock = {"A.a": Outcome("passed"), "A.b": Outcome("passed"), "A.c": Outcome("skipped")}
    ours = {"A.a": Outcome("passed"), "A.b": Outcome("failed", "why")}
    assert compare("test_a.py", "classes", stock, ours, [entry]) == (1, [])
    assert entry.passed == {"test_a.py::A.a (classes)"}
    (unlisted,) = compare("test_a.py", "register", stock, ours, [entry])[1]
    assert unlisted.startswith("test_a.py::A.b (register) passes with stock classes; with ours: failed why")


def test_every_entry_of_the_table_has_a_reason() -> None:
    table = read_table(SCRIPT.with_name("pytorch_differences.toml"))
    assert table
    for entry in table:
        assert entry.tests
        assert entry.modes
        assert len(entry.reason) > 20


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_pytorchs_own_tests() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], text=True, stderr=subprocess.PIPE, check=False)
    if done.returncode == NO_SOURCES:
        pytest.skip(done.stderr)
    assert done.returncode == 0
