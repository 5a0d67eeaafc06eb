# SPDX-License-Identifier: Apache-2.0
"""OLMo-core 3 over our writer and reader: its checkpoint functions and its trainer's Checkpointer."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from support.equality import assert_equal, sorted_keys
from support.ranks import run_ranks

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: pip install ai2-olmo-core==3.0.0")

import olmo_core.distributed.checkpoint as olmo_checkpoint
from olmo_core.distributed.checkpoint import filesystem
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module.transformer import ddp_train_module
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions

import bytecheckpoint
import bytecheckpoint.olmo
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.errors import CheckpointNotFoundError, UnsupportedError
from bytecheckpoint.olmo import OlmoReader, OlmoWriter
from bytecheckpoint.probes import probe
from frameworks.olmo_states import change, states, train_module

LIMIT_S = 200.0


@pytest.fixture
def installed() -> Iterator[None]:
    with bytecheckpoint.olmo.installed():
        yield


def is_ours(path: Path) -> bool:
    """Whether our writer wrote the checkpoint, which must be undamaged."""
    report = bytecheckpoint.verify(path)
    report.raise_if_damaged()
    return bool(report.save_ids)


# The trainer's Checkpointer, on FSDP2.


def checkpointer(run: Path) -> Checkpointer:
    if dist.is_initialized():
        os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun; else all ranks clear and make one folder
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    return Checkpointer(work_dir=run / "work", process_group=group, save_thread_count=3, load_thread_count=100)


def save_steps(run: Path) -> dict[str, Any]:
    """Saves step 1 with our writer, step 2 with it in the background while tensors change, step 3 with OLMo's own."""
    module = train_module(seed=0, num_steps=2)
    saved = states(module)
    train_state = {"global_step": 2, "rank": dist.get_rank()}
    saver = checkpointer(run)
    with bytecheckpoint.olmo.installed():
        saver.save(run / "step1", module, train_state)
    saver.save(run / "step3", module, train_state)
    with bytecheckpoint.olmo.installed():
        future = saver.save_async(run / "step2", module, train_state)
        change(module)
        future.result(timeout=LIMIT_S)
    dist.barrier()
    return saved


def load_steps(run: Path) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Loads steps 1 and 3 with the reader of the side that did not write them, and step 2 with both readers."""
    loaded = []
    loader = checkpointer(run)
    module = train_module(seed=1, num_steps=1)
    for step, by_ours in (("step1", False), ("step2", False), ("step2", True), ("step3", True)):
        change(module)
        if by_ours:
            with bytecheckpoint.olmo.installed():
                train_state = loader.load(run / step, module)
        else:
            train_state = loader.load(run / step, module)
        loaded.append((step, train_state, states(module)))
    return loaded


def test_the_checkpointer_of_four_ranks_and_of_two(tmp_path: Path) -> None:
    saved = run_ranks(4, save_steps, tmp_path, limit_s=LIMIT_S)[0]

    assert [step for step, _ in sorted(Checkpointer.find_checkpoints(tmp_path))] == [1, 2, 3]
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step3")
    assert is_ours(tmp_path / "step1" / "model_and_optim")
    assert is_ours(tmp_path / "step2" / "model_and_optim")
    assert not is_ours(tmp_path / "step3" / "model_and_optim")

    for rank, of_rank in enumerate(run_ranks(2, load_steps, tmp_path, limit_s=LIMIT_S)):
        assert [step for step, _, _ in of_rank] == ["step1", "step2", "step2", "step3"]
        for _, train_state, state in of_rank:
            assert train_state == {"global_step": 2, "rank": rank}
            assert_equal(state, saved)


# Functions of olmo_core.distributed.checkpoint, on two ranks.


def loaded_over_changes(module: Any, path: Path, **options: Any) -> dict[str, Any]:
    change(module)
    olmo_checkpoint.load_model_and_optim_state(path, module.model, module.optim, **options)
    return states(module)


def save_and_load(folder: Path, key_mapping: dict[str, str]) -> None:
    module = train_module(seed=0, num_steps=2)
    saved = states(module)
    given = module.model, module.optim

    olmo_checkpoint.save_model_and_optim_state(folder / "nested", *given, thread_count=3, process_count=2)
    assert_equal(loaded_over_changes(module, folder / "nested"), saved)

    flat = {"flatten_optimizer_state": True}
    future = olmo_checkpoint.async_save_model_and_optim_state(folder / "flat", *given, enable_plan_caching=True, **flat)
    change(module)
    future.result(timeout=LIMIT_S)
    assert_equal(loaded_over_changes(module, folder / "flat", **flat), saved)

    state = olmo_checkpoint._prepare_state_dict(*given)
    olmo_checkpoint.swap_param_keys(state, key_mapping)
    olmo_checkpoint.save_state_dict(folder / "renamed", state)
    assert_equal(loaded_over_changes(module, folder / "renamed", key_mapping=key_mapping), saved)

    # The errors say what to pass if an option is left out.
    with pytest.raises(
        CheckpointException, match=r"it has .*old\.weight, which this load does not ask for.*key_mapping="
    ):
        loaded_over_changes(module, folder / "renamed")
    with pytest.raises(CheckpointException, match="saved with flatten_optimizer_state=True: load with the same value"):
        loaded_over_changes(module, folder / "flat")
    with pytest.raises(CheckpointException, match="saved with flatten_optimizer_state=False: load with the same value"):
        loaded_over_changes(module, folder / "nested", **flat)
    with pytest.raises(FileExistsError):
        olmo_checkpoint.save_model_and_optim_state(folder / "flat", *given)

    loaded_over_changes(module, folder / "nested")
    future = olmo_checkpoint.async_save_state_dict(
        folder / "flat", {"model": module.model.state_dict()}, save_overwrite=True
    )
    future.result(timeout=LIMIT_S)
    with pytest.raises(CheckpointException, match="it has no optimizer state: load with optim=None"):
        loaded_over_changes(module, folder / "flat")
    change(module)
    olmo_checkpoint.load_model_and_optim_state(folder / "flat", module.model)
    assert_equal({name: states(module)[name] for name in module.model.state_dict()}, of_model(saved, module))


def of_model(state: dict[str, Any], module: Any) -> dict[str, Any]:
    return {name: state[name] for name in module.model.state_dict()}


def save_and_load_installed(folder: Path, key_mapping: dict[str, str]) -> None:
    with bytecheckpoint.olmo.installed():
        save_and_load(folder, key_mapping)


def test_model_and_optimizer_by_every_function(tmp_path: Path) -> None:
    run_ranks(2, save_and_load_installed, tmp_path, {"embeddings.weight": "old.weight"}, limit_s=LIMIT_S)

    assert all(is_ours(tmp_path / name) for name in ("nested", "flat", "renamed"))


def load_what_there_is(folder: Path) -> None:
    """Loads a checkpoint that lacks a key into a train module that is not strict."""
    lenient = StateDictOptions(strict=False, flatten_optimizer_state_dict=True)
    module = train_module(seed=0, num_steps=1, state_dict_load_opts=lenient)
    saved = states(module)
    state = module.state_dict_to_save()
    left_out = "lm_head.w_out.weight"
    del state["model"][left_out]
    with bytecheckpoint.olmo.installed():
        olmo_checkpoint.save_state_dict(folder / "part", state)
        change(module)
        changed = states(module)[left_out]
        checkpointer(folder).load(folder / "part", module)
    assert_equal(states(module), {**saved, left_out: changed})


def test_a_train_module_that_is_not_strict(tmp_path: Path) -> None:
    run_ranks(2, load_what_there_is, tmp_path, limit_s=LIMIT_S)

    assert is_ours(tmp_path / "part")


# One process, without a process group.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Saves the same state with our writer ("ours") and OLMo-core's ("theirs"). Returns both paths and the state."""
    module = train_module(seed=0, num_steps=1)
    folder = tmp_path_factory.mktemp("saved")
    with bytecheckpoint.olmo.installed():
        olmo_checkpoint.save_model_and_optim_state(folder / "ours", module.model, module.optim)
    olmo_checkpoint.save_model_and_optim_state(folder / "theirs", module.model, module.optim)
    assert is_ours(folder / "ours")
    assert not is_ours(folder / "theirs")
    return {"ours": folder / "ours", "theirs": folder / "theirs", "state": states(module), "module": module}


# Pairs of a reader and the writer whose checkpoint it reads.
READS = pytest.mark.parametrize(("reader", "writer"), [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")])


@contextmanager
def reading_by(reader: str) -> Iterator[None]:
    with bytecheckpoint.olmo.installed() if reader == "ours" else nullcontext():
        yield


@READS
def test_unshard_checkpoint(
    reader: str, writer: str, saved: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(olmo_checkpoint, "gc_cuda", lambda: None)  # takes 0.2 s for each file
    wanted = sorted_keys(of_model(saved["state"], saved["module"]))
    chunks = olmo_checkpoint.UnshardStrategy.chunks(20_000)
    tensors = olmo_checkpoint.UnshardStrategy.one_file_per_tensor()

    with reading_by(reader):
        model_path, optim_path = olmo_checkpoint.unshard_checkpoint(saved[writer], tmp_path / "one", quiet=True)
        in_chunks, _ = olmo_checkpoint.unshard_checkpoint(
            saved[writer], tmp_path / "chunks", unshard_strategy=chunks, quiet=True, pre_download=True
        )
        by_tensor, _ = olmo_checkpoint.unshard_checkpoint(
            saved[writer], tmp_path / "tensors", unshard_strategy=tensors, work_dir=tmp_path / "work"
        )
        safe_path, none = olmo_checkpoint.unshard_checkpoint(saved[writer], tmp_path / "safe", use_safetensors=True)

    assert_equal(sorted_keys(torch.load(model_path)), wanted)
    optim = torch.load(optim_path, weights_only=False)
    moments = optim["state"]["blocks.0.attention.w_q.weight"]
    assert torch.equal(moments["exp_avg"], saved["state"]["state.blocks.0.attention.w_q.weight.exp_avg"])
    assert optim["param_groups"][0]["betas"] == (0.9, 0.999)
    assert none is None
    assert_equal(sorted_keys(safetensors.torch.load_file(safe_path)), wanted)
    assert len(list(in_chunks.iterdir())) > 1
    assert_equal(sorted_keys({k: v for file in in_chunks.iterdir() for k, v in torch.load(file).items()}), wanted)
    assert len(list(by_tensor.iterdir())) == len(wanted)
    assert_equal(sorted_keys({k: v for file in by_tensor.iterdir() for k, v in torch.load(file).items()}), wanted)


@READS
def test_keys_and_metadata(reader: str, writer: str, saved: dict[str, Any]) -> None:
    with reading_by(reader):
        keys = ["optim.param_groups", "model.lm_head.norm.weight", "model.embeddings.weight"]
        groups, *tensors = olmo_checkpoint.load_keys(saved[writer], keys)
        metadata = olmo_checkpoint.get_checkpoint_metadata(saved[writer])
        with pytest.raises(KeyError):
            next(olmo_checkpoint.load_keys(saved[writer], ["model.nothing"]))

    assert groups[0]["lr"] == 1e-2
    assert torch.equal(tensors[0], saved["state"]["lm_head.norm.weight"])
    assert torch.equal(tensors[1], saved["state"]["embeddings.weight"])
    embeddings = metadata.state_dict_metadata["model.embeddings.weight"]
    assert (embeddings.size, embeddings.properties.dtype) == (torch.Size([64, 32]), torch.float32)


@READS
def test_another_dtype_in_the_model(reader: str, writer: str, saved: dict[str, Any]) -> None:
    """The load converts the dtype, as OLMo-core does."""
    state = {"model": {"embeddings": {"weight": torch.zeros(64, 32, dtype=torch.bfloat16)}}}

    with reading_by(reader):
        olmo_checkpoint.load_state_dict(saved[writer], state)

    assert torch.equal(state["model"]["embeddings"]["weight"], saved["state"]["embeddings.weight"].bfloat16())


def test_another_shape_in_the_model(installed: None, saved: dict[str, Any]) -> None:
    state = {"model": {"embeddings": {"weight": torch.zeros(64, 31)}}}

    with pytest.raises(CheckpointException, match=r"'model\.embeddings\.weight': stored is a tensor of \[64, 32\]"):
        olmo_checkpoint.load_state_dict(saved["theirs"], state)


@dataclass
class Note:
    text: str


def test_objects_of_classes(tmp_path: Path) -> None:
    with bytecheckpoint.olmo.installed():
        olmo_checkpoint.save_state_dict(tmp_path / "c", {"note": Note("n"), "step": 3})
        with pytest.raises(CheckpointException, match=r"'note'.*allow_pickle"):
            olmo_checkpoint.load_state_dict(tmp_path / "c", {"note": None, "step": 0})
    state = {"note": None, "step": 0}
    with bytecheckpoint.olmo.installed(allow_pickle=True):
        olmo_checkpoint.load_state_dict(tmp_path / "c", state)

    assert state == {"note": Note("n"), "step": 3}


def test_a_save_that_failed_can_be_repeated(installed: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"local object .*<lambda>"):
        olmo_checkpoint.save_state_dict(tmp_path / "c", {"a": torch.ones(3), "bad": lambda: None})

    olmo_checkpoint.save_state_dict(tmp_path / "c", {"a": torch.ones(3)})

    assert is_ours(tmp_path / "c")


@pytest.mark.parametrize("made", [OlmoWriter, OlmoReader])
def test_threads(made: type, tmp_path: Path) -> None:
    assert made(tmp_path).config.io_threads == bytecheckpoint.Config().io_threads
    assert made(tmp_path, thread_count=1).config.io_threads == 1
    assert made(tmp_path, thread_count=40).config.io_threads == 16
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            made(tmp_path, thread_count=wrong)


def test_a_writer_goes_to_another_process(tmp_path: Path) -> None:
    copy = pickle.loads(pickle.dumps(OlmoWriter(tmp_path, thread_count=5)))

    assert (type(copy), copy.path, copy.config.io_threads) == (OlmoWriter, tmp_path, 5)


def test_no_checkpoint_there(installed: None, tmp_path: Path) -> None:
    for step in (9, 10, 200):
        olmo_checkpoint.save_state_dict(tmp_path / f"step{step}" / "model_and_optim", {"a": 1})

    wrong = {
        "step10": f"did you mean {tmp_path}/step10/model_and_optim",
        "step11/model_and_optim": f"{tmp_path} has step9, step10, step200",
        "step11": f"{tmp_path} has step9, step10, step200",
        ".": f"{tmp_path} has step9, step10, step200",
        "other/run/step1": "no checkpoint there$",
    }
    for name, text in wrong.items():
        for call in (
            olmo_checkpoint.get_checkpoint_metadata,
            lambda path: next(olmo_checkpoint.load_keys(path, ["a"])),
        ):
            with pytest.raises(FileNotFoundError, match=text) as raised:
                call(tmp_path / name)
            assert type(raised.value) is CheckpointNotFoundError
        with pytest.raises(CheckpointException, match=text.removesuffix("$")):
            olmo_checkpoint.load_state_dict(tmp_path / name, {"a": None})


UNSHARD_WITHOUT_US = """
import sys
import warnings
sys.modules["bytecheckpoint"] = None  # an ImportError for whoever asks for it
from olmo_core.distributed.checkpoint import unshard_checkpoint
unshard_checkpoint(sys.argv[1], sys.argv[2], quiet=True)
assert not [name for name in sys.modules if name.startswith("bytecheckpoint.")]
"""


def test_olmo_reads_ours_where_we_are_not_installed(saved: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNSHARD_WITHOUT_US, str(saved["ours"]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert done.returncode == 0, done.stderr
    wanted = of_model(saved["state"], saved["module"])
    assert_equal(sorted_keys(torch.load(tmp_path / "model.pt")), sorted_keys(wanted))
    optim = torch.load(tmp_path / "optim.pt", weights_only=False)
    assert optim["state"].keys() == {name for name, _ in saved["module"].model.named_parameters()}


# The names that install() replaces.


def names() -> list[Any]:
    return [
        getattr(module, name)
        for module in (olmo_checkpoint, ddp_train_module)
        for name in ("RemoteFileSystemWriter", "RemoteFileSystemReader", "dist_cp", "DefaultSavePlanner")
    ]


def test_install_and_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = names()
    bytecheckpoint.olmo.install()
    try:
        ours = names()
        bytecheckpoint.olmo.install()
        with bytecheckpoint.olmo.installed():
            assert names() == ours
        assert names() == ours
        assert not any(a is b for a, b in zip(ours, theirs, strict=True))
        assert ours[3] is BcpSavePlanner
        assert filesystem.RemoteFileSystemWriter is theirs[0]
        later = ModuleType("olmo_core.later")
        later.RemoteFileSystemWriter = olmo_checkpoint.RemoteFileSystemWriter  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, later.__name__, later)
    finally:
        bytecheckpoint.olmo.uninstall()

    assert all(a is b for a, b in zip(names(), theirs, strict=True))
    assert later.RemoteFileSystemWriter is filesystem.RemoteFileSystemWriter
    bytecheckpoint.olmo.uninstall()


def test_settings(tmp_path: Path) -> None:
    config = bytecheckpoint.Config(io_threads=7, planner_cache_capacity=3)
    with bytecheckpoint.olmo.installed(config=config):
        assert olmo_checkpoint.RemoteFileSystemWriter(tmp_path).config == config
        assert olmo_checkpoint.RemoteFileSystemReader(tmp_path).config == config
        assert olmo_checkpoint.DefaultSavePlanner(dedup_save_to_lowest_rank=True).config == config


def test_beside_register(installed: None, saved: dict[str, Any], tmp_path: Path) -> None:
    with bytecheckpoint.registered():
        state = {"model": {"embeddings": {"weight": torch.zeros(64, 32)}}}
        olmo_checkpoint.load_state_dict(saved["ours"], state)
        future = olmo_checkpoint.async_save_state_dict(tmp_path / "c", state)
        future.result(timeout=LIMIT_S)

    assert is_ours(tmp_path / "c")
    assert torch.equal(state["model"]["embeddings"]["weight"], saved["state"]["embeddings.weight"])


def other_flow(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(olmo_checkpoint, "load_state_dict", lambda dir, state_dict: None)
    return "probe olmo_core.distributed.checkpoint:load_state_dict: its code does not use RemoteFileSystemReader"


def other_arguments(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(olmo_checkpoint, "RemoteFileSystemWriter", lambda path: None)
    return "probe olmo_core.distributed.checkpoint:RemoteFileSystemWriter: it takes path instead of"


def name_gone(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(olmo_checkpoint, "DefaultSavePlanner")
    return "probe olmo_core.distributed.checkpoint: it has no DefaultSavePlanner"


def not_installed(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(probe, "find_spec", lambda package: None if package == "olmo_core" else package)
    monkeypatch.setitem(sys.modules, "olmo_core.distributed.checkpoint", None)
    return r"ai2-olmo-core is not installed\..*pip install ai2-olmo-core==3\.0\.0"


@pytest.mark.parametrize("change_olmo", [other_flow, other_arguments, name_gone, not_installed])
def test_what_is_not_as_expected(change_olmo: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = change_olmo(monkeypatch)
    before = dict(vars(olmo_checkpoint))

    with pytest.raises(UnsupportedError, match=text):
        bytecheckpoint.olmo.install()

    assert vars(olmo_checkpoint) == before


def test_a_newer_version_in_which_all_holds_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = probe.version
    monkeypatch.setattr(probe, "version", lambda name: "3.1.0" if name == "ai2-olmo-core" else theirs(name))
    probe._warn_if_newer.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"ai2-olmo-core 3\.1\.0 is newer than 3\.0"):
        bytecheckpoint.olmo.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warns once in a process
        bytecheckpoint.olmo.install()
    bytecheckpoint.olmo.uninstall()


def test_blocks_that_overlap() -> None:
    theirs = names()
    first, second = bytecheckpoint.olmo.installed(), bytecheckpoint.olmo.installed()
    first.__enter__()
    second.__enter__()
    ours = names()
    first.__exit__(None, None, None)
    assert names() == ours
    second.__exit__(None, None, None)
    assert all(a is b for a, b in zip(names(), theirs, strict=True))
