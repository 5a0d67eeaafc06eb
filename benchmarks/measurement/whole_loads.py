# SPDX-License-Identifier: Apache-2.0
"""Ways in which one process loads all of a Hugging Face folder to one device.

Run as a script, this file tries one of them: what another package does may end its process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import bytecheckpoint

BASELINE = "safetensors.load_file"
OURS = "bytecheckpoint"
OF_DCP = "DCP's HuggingFaceStorageReader"
FASTSAFETENSORS = "fastsafetensors"
RUN_AI = "Run:ai Model Streamer"
# What another package than those of the benchmarks does, and the name under which it is imported.
_PACKAGES = {FASTSAFETENSORS: "fastsafetensors", RUN_AI: "runai_model_streamer"}
_TRIAL_S = 30.0

State = dict[str, torch.Tensor]


def _with_safetensors(files: list[Path], device: torch.device) -> State:
    loaded = {name: tensor for file in files for name, tensor in load_file(file, device=str(device)).items()}
    # On the host it maps the files, and reads nothing before it is used.
    return {name: tensor.clone() for name, tensor in loaded.items()} if device.type == "cpu" else loaded


def _with_fastsafetensors(files: list[Path], device: torch.device) -> State:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    name = "cuda:0" if device.type == "cuda" else "cpu"
    loader = SafeTensorsFileLoader(SingleGroup(), name, nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    buffers = loader.copy_files_to_device()
    state = {key: buffers.get_tensor(key) for key in loader.get_keys()}
    buffers.close()
    loader.close()
    return state


def _with_run_ai(files: list[Path], device: torch.device) -> State:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in files], device=str(device))
        # On the host its tensors are views of a buffer that is used again.
        return {name: tensor.clone() if device.type == "cpu" else tensor for name, tensor in streamer.get_tensors()}


_NEW_TENSORS: dict[str, Callable[[list[Path], torch.device], State]] = {
    BASELINE: _with_safetensors,
    FASTSAFETENSORS: _with_fastsafetensors,
    RUN_AI: _with_run_ai,
}


def _reasons_to_leave_out(folder: Path, device: torch.device) -> dict[str, str]:
    """Returns which loads of other packages are not possible here, and why. Tries each in a process of its own."""
    reasons = {name: f"{package} is not installed" for name, package in _PACKAGES.items() if find_spec(package) is None}
    trials = {
        name: subprocess.Popen(
            [sys.executable, __file__, name, str(device), str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in _PACKAGES
        if name not in reasons
    }
    for name, trial in trials.items():
        try:
            _, said = trial.communicate(timeout=_TRIAL_S)
        except subprocess.TimeoutExpired:
            trial.kill()
            trial.communicate()
            reasons[name] = f"it did not end within {_TRIAL_S:.0f} s"
            continue
        if trial.returncode:
            lines = said.strip().splitlines()
            ended = f"signal {-trial.returncode}" if trial.returncode < 0 else f"exit status {trial.returncode}"
            reasons[name] = f"{ended}: {lines[-1]}" if lines else ended
    return reasons


class WholeLoads:
    """The loads of one folder.

    Attributes:
        names: Those that can take part, ours first.
        left_out: Those that cannot, with the reason.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._files = sorted(folder.glob("*.safetensors"))
        self._wanted = _with_safetensors(self._files, torch.device("cpu"))
        self._state: State = {}
        self.left_out = _reasons_to_leave_out(folder, device)
        self.names = [name for name in (OURS, OF_DCP, *_NEW_TENSORS) if name not in self.left_out]

    def prepared(self, name: str) -> Callable[[], None]:
        """Returns the load; what it fills exists, and what the load before returned is freed."""
        self._state = {}
        if name in (OURS, OF_DCP):
            self._state = {key: torch.zeros_like(value, device=self._device) for key, value in self._wanted.items()}
        self._synchronize()

        def load() -> None:
            if name == OURS:
                bytecheckpoint.load_state_dict(self._folder, self._state, no_dist=True)
            elif name == OF_DCP:
                dcp.load(self._state, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)
            else:
                self._state = _NEW_TENSORS[name](self._files, self._device)
            self._synchronize()

        return load

    def check(self, name: str) -> None:
        """Raises an AssertionError if the last load did not give what is in the files, on the device."""
        if self._state.keys() != self._wanted.keys():
            raise AssertionError(f"{name}: other tensors than those of the files")
        for key, wanted in self._wanted.items():
            got = self._state[key]
            if got.device.type != self._device.type or got.dtype != wanted.dtype or not torch.equal(got.cpu(), wanted):
                raise AssertionError(f"{name}: {key} is not what is in the files")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _try(name: str, device: str, folder: str) -> None:
    _NEW_TENSORS[name](sorted(Path(folder).glob("*.safetensors")), torch.device(device))


if __name__ == "__main__":
    _try(*sys.argv[1:])
