# SPDX-License-Identifier: Apache-2.0
"""Tests settings: where their values come from, and which values are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import ConfigError

MIB = 1 << 20


def test_defaults() -> None:
    config = Config()
    assert config == Config.from_env({})
    assert (config.ring_bytes, config.io_threads, config.direct_io, config.verify) == (24 * MIB, 2, True, True)
    assert (config.commit_deadline_s, config.io_timeout_s, config.take_over) == (3600.0, 1800.0, False)
    assert config.allow_pickle is False
    assert config.progress is False
    assert (config.staging_bytes, config.staging_threads, config.on_staging_busy) == (0, 2, "wait")
    assert (config.overlap_staging, config.handle_sigterm, config.exit_timeout_s) == (False, False, 1800.0)


def test_a_choice_is_one_of_those_there_are() -> None:
    assert Config().shared_reading == "auto"
    with pytest.raises(ConfigError, match="must be one of auto, cooperative, independent"):
        Config(shared_reading="together")
    with pytest.raises(ConfigError, match="'sometimes'"):
        Config.from_env({"BYTECHECKPOINT_SHARED_READING": "sometimes"})


def test_it_is_a_frozen_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().verify = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(64 * MIB)  # type: ignore[call-arg]
    assert hash(Config()) == hash(Config())


def test_from_env() -> None:
    environ = {
        "BYTECHECKPOINT_RING_BYTES": "33554432",
        "BYTECHECKPOINT_IO_THREADS": "4",
        "BYTECHECKPOINT_LOAD_IO_THREADS": "3",
        "BYTECHECKPOINT_NICENESS": "5",
        "BYTECHECKPOINT_DIRECT_IO": "off",
        "BYTECHECKPOINT_VERIFY": "0",
        "BYTECHECKPOINT_COMMIT_DEADLINE_S": "1.5",
        "BYTECHECKPOINT_IO_TIMEOUT_S": "2.5",
        "BYTECHECKPOINT_VISIBILITY_TIMEOUT_S": "3.5",
        "BYTECHECKPOINT_TAKE_OVER": "Yes",
        "BYTECHECKPOINT_ALLOW_PARTIAL_TENSORS": "on",
        "BYTECHECKPOINT_ACCEPT_REWRITTEN_METADATA": "1",
        "BYTECHECKPOINT_ENABLE_TREE_TOPO": "0",
        "BYTECHECKPOINT_TREE_TOPO_THRESHOLD": "8",
        "BYTECHECKPOINT_TREE_TOPO_FAN_OUT": "4",
        "BYTECHECKPOINT_PLANNING": "As given",
        "BYTECHECKPOINT_PLANNER_CACHE_CAPACITY": "2",
        "BYTECHECKPOINT_ALLOW_PICKLE": " true ",
        "BYTECHECKPOINT_UNSAFE_OBJECTS": "error",
        "BYTECHECKPOINT_DIFFERING_COPIES": "Check",
        "BYTECHECKPOINT_TENSOR_SUBCLASSES": "Opaque",
        "BYTECHECKPOINT_SHARED_READING": " Cooperative",
        "BYTECHECKPOINT_WRITE_BYTES_PER_S": "2097152",
        "BYTECHECKPOINT_STAGING_BYTES": "1073741824",
        "BYTECHECKPOINT_STAGING_THREADS": "4",
        "BYTECHECKPOINT_ON_STAGING_BUSY": "Double_Buffer",
        "BYTECHECKPOINT_OVERLAP_STAGING": "1",
        "BYTECHECKPOINT_HANDLE_SIGTERM": "yes",
        "BYTECHECKPOINT_EXIT_TIMEOUT_S": "9.5",
        "BYTECHECKPOINT_FAILED_SAVE_EXIT_CODE": "70",
        "BYTECHECKPOINT_LINK_UNCHANGED": "1",
        "BYTECHECKPOINT_LINK_REWRITE_EVERY": "5",
        "BYTECHECKPOINT_STALL_TIMEOUT_S": "7",
        "BYTECHECKPOINT_DIGEST": "1",
        "BYTECHECKPOINT_TRACE": "Full",
        "BYTECHECKPOINT_JOURNAL": " /Runs/7/.bcp",
        "BYTECHECKPOINT_JOURNAL_HOSTS": "0",
        "BYTECHECKPOINT_SLOW_FACTOR": "3",
        "BYTECHECKPOINT_PROGRESS": "1",
        "BYTECHECKPOINT_STORE_CONCURRENCY": "5",
        "PATH": "/bin",
        "BYTECHECK": "another prefix",
    }
    wanted = Config(
        ring_bytes=32 * MIB,
        io_threads=4,
        load_io_threads=3,
        niceness=5,
        write_bytes_per_s=2 * MIB,
        direct_io=False,
        verify=False,
        commit_deadline_s=1.5,
        io_timeout_s=2.5,
        visibility_timeout_s=3.5,
        take_over=True,
        allow_partial_tensors=True,
        accept_rewritten_metadata=True,
        enable_tree_topo=False,
        tree_topo_threshold=8,
        tree_topo_fan_out=4,
        planning="as given",
        planner_cache_capacity=2,
        allow_pickle=True,
        unsafe_objects="error",
        differing_copies="check",
        tensor_subclasses="opaque",
        shared_reading="cooperative",
        staging_bytes=1 << 30,
        staging_threads=4,
        on_staging_busy="double_buffer",
        overlap_staging=True,
        handle_sigterm=True,
        exit_timeout_s=9.5,
        failed_save_exit_code=70,
        link_unchanged=True,
        link_rewrite_every=5,
        stall_timeout_s=7.0,
        digest=True,
        trace="full",
        journal="/Runs/7/.bcp",
        journal_hosts=False,
        slow_factor=3.0,
        progress=True,
        store_concurrency=5,
    )
    assert Config.from_env(environ) == wanted
    # Options of stores come from the variables of their providers.
    assert set(dataclasses.asdict(wanted)) - {"storage_options"} == {
        name.removeprefix("BYTECHECKPOINT_").lower() for name in environ if name.startswith("BYTECHECKPOINT_")
    }, "a setting without a variable here"


@pytest.mark.parametrize("word", ["1", "true", "yes", "on", "TRUE", " On"])
def test_words_for_true(word: str) -> None:
    assert Config.from_env({"BYTECHECKPOINT_TAKE_OVER": word}).take_over is True


@pytest.mark.parametrize("word", ["0", "false", "no", "off", "FALSE"])
def test_words_for_false(word: str) -> None:
    assert Config.from_env({"BYTECHECKPOINT_VERIFY": word}).verify is False


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"BYTECHECKPOINT_RING_BITES: no such setting.*BYTECHECKPOINT_RING_BYTES"):
        Config.from_env({"BYTECHECKPOINT_RING_BITES": "1"})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RING_BYTES", "64MiB"),
        ("RING_BYTES", ""),
        ("RING_BYTES", "1e8"),
        ("IO_THREADS", "two"),
        ("VERIFY", "maybe"),
        ("VERIFY", ""),
        ("COMMIT_DEADLINE_S", "soon"),
        ("RING_BYTES", "1"),
        ("IO_THREADS", "0"),
        ("TREE_TOPO_THRESHOLD", "0"),
        ("TREE_TOPO_FAN_OUT", "1"),
        ("PLANNER_CACHE_CAPACITY", "0"),
        ("COMMIT_DEADLINE_S", "nan"),
        ("COMMIT_DEADLINE_S", "-1"),
    ],
)
def test_wrong_values_in_the_environment(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable.lower() if text in {"1", "0", "nan", "-1"} else variable):
        Config.from_env({f"BYTECHECKPOINT_{variable}": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ring_bytes", 16 * MIB),
        ("ring_bytes", 256 * MIB),
        ("write_bytes_per_s", 0),
        ("write_bytes_per_s", MIB),
        ("io_threads", 1),
        ("io_threads", 16),
        ("tree_topo_threshold", 1),
        ("tree_topo_fan_out", 2),
        ("planner_cache_capacity", 1),
        ("commit_deadline_s", 0.0),
        ("commit_deadline_s", float("inf")),
        ("io_timeout_s", 0.0),
        ("io_timeout_s", float("inf")),
    ],
)
def test_ends_of_the_ranges(name: str, value: Any) -> None:
    assert getattr(Config(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ring_bytes", 16 * MIB - 1),
        ("ring_bytes", 256 * MIB + 1),
        ("ring_bytes", True),
        ("ring_bytes", "64"),
        ("ring_bytes", float(64 * MIB)),
        ("write_bytes_per_s", -1),
        ("write_bytes_per_s", MIB - 1),
        ("io_threads", 0),
        ("io_threads", 17),
        ("io_threads", 1.5),
        ("commit_deadline_s", -0.1),
        ("commit_deadline_s", float("nan")),
        ("commit_deadline_s", None),
        ("io_timeout_s", -0.1),
        ("io_timeout_s", float("nan")),
        ("verify", "no"),
        ("direct_io", None),
        ("allow_pickle", 1),
    ],
)
def test_wrong_values(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Config(**{name: value})


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="io_threads=0"):
        Config(io_threads=0)


def test_the_environment_is_read_when_the_object_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTECHECKPOINT_VERIFY", "off")
    reader, writer = BcpReader(tmp_path), BcpWriter(tmp_path)
    monkeypatch.setenv("BYTECHECKPOINT_VERIFY", "on")
    assert not reader.config.verify
    assert not writer.config.verify
    assert BcpReader(tmp_path).config.verify
    assert not BcpReader(tmp_path, config=Config(verify=False)).config.verify
    monkeypatch.setenv("BYTECHECKPOINT_NO_SUCH_THING", "1")
    with pytest.raises(ConfigError, match="BYTECHECKPOINT_NO_SUCH_THING"):
        BcpWriter(tmp_path)
    assert BcpWriter(tmp_path, config=Config()).config == Config()
