# SPDX-License-Identifier: Apache-2.0
"""What is said of checkpoints in formats that are not read here, and of runs of them."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.cli_runs import run, save

import bytecheckpoint
from bytecheckpoint import Retention, latest, scan_steps
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError

# Names in a folder, and what must be said of it.
FOLDERS = {
    "a step of Megatron-LM in its format 'torch'": ["mp_rank_00_001/model_optim_rng.pt"],
    "files of the ranks of a job": ["optim_world_size_4_rank_3.pt", "fsdp_config.json"],
    "files of ranks, as torch_checkpointing writes": ["model_0.pt", "model_1.pt", "trainer_0.pt"],
    "a folder of Orbax whose arrays are in an OCDBT database": ["_METADATA", "manifest.ocdbt", "d/abc"],
    "a step of Orbax": ["_CHECKPOINT_METADATA", "default/x"],
    "a group of zarr": ["zarr.json"],
    "a step of nanotron": ["checkpoint_metadata.json", "model_config.json", "model/x"],
    "a checkpoint of PaddlePaddle": ["0.metadata", "0_0.distcp"],
    "a step of transformers' Trainer": ["trainer_state.json", "scheduler.pt"],
    "a run of Composer": ["ep1-ba20/x"],
}


def put(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder(tmp_path: Path, what: str) -> None:
    folder = put(tmp_path / "there", FOLDERS[what])
    said = run("ls", str(folder))
    assert said.exit_code == 2
    assert what in said.stderr
    assert "which is not read here: " in said.stderr
    with pytest.raises(CheckpointNotFoundError, match="not read here"):
        bytecheckpoint.load_state_dict(folder, {"w": torch.ones(1)}, no_dist=True)


def test_a_step_of_verl_is_not_called_one_without_a_model(tmp_path: Path) -> None:
    put(tmp_path / "run" / "global_step_7", ["model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"])
    (step,) = scan_steps(tmp_path / "run")
    assert step.reason == (
        "it is files of the ranks of a job, as verl writes, which ls, verify, load and convert take, but no step of a "
        "run of DCP"
    )


def test_a_run_says_what_its_steps_are(tmp_path: Path) -> None:
    put(tmp_path / "run", ["10/checkpoint_metadata.json", "10/model_config.json", "9/mp_rank_00_model_states.pt"])
    said = run("ls", str(tmp_path / "run"))
    assert "a run folder with the steps 9, 10; of " in said.stderr
    assert "a step of nanotron" in said.stderr
    of_deepspeed, of_nanotron = scan_steps(tmp_path / "run")
    assert (of_deepspeed.state, of_nanotron.state) == ("unknown", "unknown")
    assert "a step of DeepSpeed, which ls, verify, load and convert take" in of_deepspeed.reason
    assert "a step of nanotron, which is not read here: " in of_nanotron.reason
    assert not of_nanotron.is_faulty
    assert "DeepSpeed" in run("steps", str(tmp_path / "run")).stdout


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["zero/w/fp32.pt"], "a universal checkpoint of DeepSpeed"),
        (["mp_rank_00_model_states.pt"], "a step of DeepSpeed"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "a step of DeepSpeed"),
    ],
)
def test_a_step_of_deepspeed_that_lacks_files(tmp_path: Path, names: list[str], what: str) -> None:
    said = run("ls", str(put(tmp_path, names))).stderr
    assert f"it is {what}, but not whole: a whole one has " in said
    assert "mp_rank_00_model_states.pt" in said


def test_weights_in_the_steps_of_a_run(tmp_path: Path) -> None:
    put(tmp_path / "run", ["checkpoint-9/pytorch_model-00001-of-00002.bin", "checkpoint-10/trainer_state.json"])
    step = tmp_path / "run" / "checkpoint-10"
    save_file({"w": torch.ones(2)}, step / "model.safetensors")
    weights = "it is a folder of weights, as Hugging Face writes, which ls, verify, load and convert take"
    assert [each.reason.startswith(weights) for each in scan_steps(tmp_path / "run")] == [True, True]
    # `latest` knows no such steps, so it is not named.
    assert run("ls", str(tmp_path / "run")).stderr.endswith(f"pass the folder of one, as '{step}'\n")
    assert run("ls", str(step)).exit_code == 0


def test_a_step_of_orbax_says_what_is_in_it(tmp_path: Path) -> None:
    put(tmp_path / "run", ["1/_CHECKPOINT_METADATA", "1/state/manifest.ocdbt", "1/state/_METADATA"])
    (tmp_path / "run" / "2").mkdir()
    for at in ("run", "run/1"):
        said = run("ls", str(tmp_path / at)).stderr
        assert f"it is a step of Orbax; of '{tmp_path}/run/1/state': it is a folder of Orbax whose arrays" in said
    save_file({"w": torch.ones(2)}, put(tmp_path, ["run/1/text/config.json"]) / "run/1/text/model.safetensors")
    assert f"it is a step of Orbax: pass '{tmp_path}/run/1/text'" in run("ls", str(tmp_path / "run" / "1")).stderr


def test_a_folder_of_nothing_known(tmp_path: Path) -> None:
    put(tmp_path, ["b.txt", "model_optim_rng.pt"])
    assert run("ls", str(tmp_path)).stderr == (
        f"bcp: open({tmp_path}): no checkpoint there: the folder holds b.txt, model_optim_rng.pt; pass one of its "
        f"files, as '{tmp_path}/model_optim_rng.pt'\n"
    )


def _export(path: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


def _joblib(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x13joblib.numpy_pickle\x94.")


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "torch.jit.load": ("m.pt", lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(path)),
    "torch.export.load": ("m.pt2", _export),
    "numpy.load": ("m.npz", lambda path: np.savez(path, a=np.ones(3))),
    "an array of numpy": ("m.npy", lambda path: np.save(path, np.ones(3))),
    "a bare pickle": ("m.bin", lambda path: path.write_bytes(pickle.dumps({"w": np.ones(3)}))),
    "a file of joblib": ("m.joblib", _joblib),
    "a file of PaddlePaddle": ("m.pdparams", lambda path: path.write_bytes(pickle.dumps({}, protocol=2))),
    "a GGUF file": ("m.gguf", lambda path: path.write_bytes(b"GGUF\x03\0\0\0")),
    "a file of tensorizer": ("m.tensors", lambda path: path.write_bytes(b"|TZR|\0\5\0\0\0")),
    "a file of flashpack": ("m.flashpack", lambda path: path.write_bytes(b"\0" * 100)),
    "an HDF5 file": ("m.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90))),
    "a tar archive": ("m.nemo", _tar),
    "a compressed file": ("m.pt.gz", lambda path: path.write_bytes(b"\x1f\x8b\x08\0")),
    "a program of ONNX": ("m.onnx", lambda path: path.write_bytes(b"\x08\x07")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", FILES)
def test_a_file(tmp_path: Path, what: str) -> None:
    name, write = FILES[what]
    write(tmp_path / name)
    said = run("ls", str(tmp_path / name))
    assert said.exit_code == 2
    assert what in said.stderr


@pytest.mark.parametrize("name", ["iter_{:07}", "epoch_{}", "ep1-ba{}", "global_step{}", "checkpoint-{}"])
def test_steps_by_the_names_that_others_give(tmp_path: Path, name: str) -> None:
    for step in (9, 10):
        save(tmp_path / name.format(step), {"w": torch.ones(2)})
    assert [each.step for each in scan_steps(tmp_path)] == [9, 10]
    assert latest(tmp_path) == str(tmp_path / name.format(10))


def test_steps_of_several_kinds_are_not_ordered(tmp_path: Path) -> None:
    save(tmp_path / "step-1", {"w": torch.ones(2)})
    (tmp_path / "epoch_2").mkdir()  # no checkpoint is in it
    assert [each.name for each in scan_steps(tmp_path)] == ["step-1"]
    save(tmp_path / "epoch_2", {"w": torch.ones(2)})
    for ask in (scan_steps, latest):
        with pytest.raises(ConfigError, match=r"step-1.*epoch_2|epoch_2.*step-1") as raised:
            ask(tmp_path)
        assert "pattern=" in str(raised.value)
    assert run("prune", str(tmp_path), "--keep-latest", "1").exit_code == 2
    assert (tmp_path / "step-1").exists()
    assert latest(tmp_path, pattern=r"epoch_(\d+)") == str(tmp_path / "epoch_2")


def test_prune_leaves_what_other_libraries_wrote(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / f"iter_{step}", no_dist=True)
    (tmp_path / "iter_1" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    report = Retention(tmp_path, keep_latest=1).prune()
    assert report.removed == [str(tmp_path / "iter_2")]
    assert report.skipped == {
        str(tmp_path / "iter_1"): "a checkpoint of Megatron-Core, which only remove_foreign=True removes"
    }
    assert Retention(tmp_path, keep_latest=1, remove_foreign=True).prune().removed == [str(tmp_path / "iter_1")]
