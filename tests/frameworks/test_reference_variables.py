# SPDX-License-Identifier: Apache-2.0
"""ByteCheckpoint's environment variables: each works as ByteCheckpoint documents, or is refused with advice."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import Config
from bytecheckpoint.checkpoint.roles import known_roles
from bytecheckpoint.dcp import rank_load, writer
from bytecheckpoint.errors import ConfigError

REFERENCE = {
    "BYTECHECKPOINT_ENABLE_TREE_TOPO": "0",
    "BYTECHECKPOINT_PLANNER_CACHE_CAPACITY": "4",
    "BYTECHECKPOINT_STORE_USE_THREAD_IO_WORKER": "1",
    "BYTECHECKPOINT_STORE_WORKER_COUNT": "3",
    "BYTECHECKPOINT_ENABLE_PINNED_MEM_D2H": "1",
    "BYTECHECKPOINT_WRITE_CKPT_TIMEOUT": "90",
    "BYTECHECKPOINT_LOAD_WORKER_COUNT": "5",
    "BYTECHECKPOINT_ROLE_SUFFIX": "Judge, teacher",
    "BYTECHECKPOINT_LOGGING_LEVEL": "warning",
    "LOCAL_RANK": "3",
    "JOB_LAUNCH_TIMESTAMP": "now",
}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("bytecheckpoint")
    before = logger.level
    yield logger
    logger.setLevel(before)


def test_all_of_them_at_once() -> None:
    assert Config.from_env(REFERENCE) == Config(
        enable_tree_topo=False,
        planner_cache_capacity=4,
        io_threads=3,
        load_io_threads=5,
        commit_deadline_s=90.0,
    )
    assert known_roles(REFERENCE)[-2:] == ("judge", "teacher")


def test_writers_leave_loads_as_they_are() -> None:
    config = Config.from_env({"BYTECHECKPOINT_STORE_WORKER_COUNT": "1"})
    assert (config.io_threads, config.load_io_threads) == (1, Config.io_threads)


@pytest.mark.parametrize(
    ("theirs", "ours", "wanted"),
    [
        ("STORE_WORKER_COUNT", "IO_THREADS", Config(io_threads=7)),
        ("LOAD_WORKER_COUNT", "LOAD_IO_THREADS", Config(load_io_threads=7)),
        ("WRITE_CKPT_TIMEOUT", "COMMIT_DEADLINE_S", Config(commit_deadline_s=7.0)),
    ],
)
def test_ours_goes_before_theirs(theirs: str, ours: str, wanted: Config) -> None:
    both = {f"BYTECHECKPOINT_{ours}": "7", f"BYTECHECKPOINT_{theirs}": "9"}
    assert Config.from_env(both) == wanted
    assert Config.from_env(dict(reversed(both.items()))) == wanted


@pytest.mark.parametrize(
    ("variable", "text", "what_to_do"),
    [
        ("STORE_USE_THREAD_IO_WORKER", "0", "unset it"),
        ("ENABLE_PINNED_MEM_D2H", "0", "unset it.*STAGING_BYTES"),
        ("MERGE_NUM_IO_WORKER", "17", "must be a number of threads from 1 to 16"),
        ("MERGE_NUM_IO_WORKER", "all", "must be a number of threads from 1 to 16"),
        ("STORE_WORKER_COUNT", "0", "from 1 to 16"),
        ("STORE_WORKER_COUNT", "17", "from 1 to 16"),
        ("STORE_WORKER_COUNT", "many", "from 1 to 16"),
        ("LOAD_WORKER_COUNT", "-1", "from 1 to 16"),
        ("WRITE_CKPT_TIMEOUT", "soon", "seconds"),
        ("WRITE_CKPT_TIMEOUT", "0", "seconds"),
        ("WRITE_CKPT_TIMEOUT", "nan", "seconds"),
        ("LOGGING_LEVEL", "LOUD", "one of .*DEBUG"),
        ("STORE_WORKER_COUNTS", "1", "no such setting"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(variable: str, text: str, what_to_do: str) -> None:
    with pytest.raises(ConfigError, match=f"BYTECHECKPOINT_{variable}.*{what_to_do}"):
        Config.from_env({f"BYTECHECKPOINT_{variable}": text})


@pytest.mark.parametrize(("text", "level"), [("debug", logging.DEBUG), ("ERROR", logging.ERROR), ("15", 15)])
def test_the_level_of_the_log_is_set_by_save_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, text: str, level: int
) -> None:
    monkeypatch.setenv("BYTECHECKPOINT_LOGGING_LEVEL", text)
    state = {"model": nn.Linear(2, 2)}
    logger.setLevel(logging.CRITICAL)
    bytecheckpoint.save(tmp_path, state, "ddp")
    assert logger.level == level
    logger.setLevel(logging.CRITICAL)
    bytecheckpoint.load(tmp_path, state, "ddp")
    assert logger.level == level
    monkeypatch.delenv("BYTECHECKPOINT_LOGGING_LEVEL")
    logger.setLevel(logging.CRITICAL)
    bytecheckpoint.save(tmp_path, state, "ddp", config=Config())
    assert logger.level == logging.CRITICAL


def test_the_threads_of_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def note(name: str, job: type) -> type:
        class Noting(job):  # type: ignore[misc]
            def __init__(self, *args: object, num_io_threads: int, **kwargs: object) -> None:
                seen.append((name, num_io_threads))
                super().__init__(*args, num_io_threads=num_io_threads, **kwargs)

        return Noting

    monkeypatch.setattr(writer._C, "SaveJob", note("save", writer._C.SaveJob))
    monkeypatch.setattr(rank_load._C, "LoadJob", note("load", rank_load._C.LoadJob))
    monkeypatch.setenv("BYTECHECKPOINT_STORE_WORKER_COUNT", "3")
    monkeypatch.setenv("BYTECHECKPOINT_LOAD_WORKER_COUNT", "5")
    model = nn.Linear(2, 2)
    bytecheckpoint.save(tmp_path, {"model": model}, "ddp")
    other = nn.Linear(2, 2)
    bytecheckpoint.load(tmp_path, {"model": other}, "ddp")
    assert seen == [("save", 3), ("load", 5)]
    monkeypatch.setenv("BYTECHECKPOINT_MERGE_NUM_IO_WORKER", "4")
    bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path, None, "ddp", return_dict=True)
    assert seen[2:] == [("load", 4)]
    assert torch.equal(model.weight, other.weight)


def test_the_docs_name_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text(encoding="utf-8")
    for variable in (*REFERENCE, "BYTECHECKPOINT_MERGE_NUM_IO_WORKER"):
        name = variable.removeprefix("BYTECHECKPOINT_")
        is_field = name.lower() in Config.__dataclass_fields__
        assert re.search(rf"`{name.lower() if is_field else name}`", page), name
