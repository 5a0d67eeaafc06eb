# SPDX-License-Identifier: Apache-2.0
"""Builds the two extension modules: `_core` without torch, `_C` with. Everything else is in pyproject.toml."""

import os
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
LAYERS = ("base", "tensor", "format", "planner", "io", "staging", "engine")
SHARED_BINDINGS = ("errors", "tree_caster", "bind_checkpoint")
CORE_BINDINGS = (
    "core_module",
    "bind_builtin",
    "bind_planning",
    "bind_verify",
    "bind_synthetic",
    "synthetic_checkpoint",
)
TORCH_BINDINGS = (
    "torch_module",
    "torch_tensor",
    "dcp_objects",
    "flatten",
    "held_state",
    "local_state",
    "global_plan",
    "read_plan",
    "write_plan",
    "bind_save_plan",
    "bind_save",
    "bind_load",
    "bind_sharing",
    "tree_copy",
    "staged_tree",
    "bind_staging",
    "bind_commit",
)

# Failpoints are for the crash tests alone; `make test` builds them apart, the installed package has none.
DEFINES = [("_GNU_SOURCE", None)]
FAILPOINTS = os.environ.get("BCP_BUILD_FAILPOINTS") == "1"
if FAILPOINTS:
    DEFINES.append(("BCP_FAILPOINTS", None))
# A build that sums nothing, and so writes checkpoints that nobody can load: benchmarks/checks.py measures against it.
if os.environ.get("BCP_BUILD_WITHOUT_CHECKS") == "1":
    DEFINES.append(("BCP_WITHOUT_CHECKS", None))

OPTIONS = {
    "include_dirs": [str(ROOT), str(Path(torch.__file__).parent / "include")],  # torch's has pybind11
    "define_macros": DEFINES,
    "extra_compile_args": [
        "-O1" if FAILPOINTS else "-O3",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-fvisibility=hidden",
    ],
    "extra_link_args": ["-pthread"],
}


CORE, TORCH = "bytecheckpoint._core", "bytecheckpoint._C"


def below_bindings() -> list[str]:
    """Sources that both modules link."""
    return [str(p.relative_to(ROOT)) for layer in LAYERS for p in sorted((ROOT / "csrc" / layer).glob("*.cpp"))]


def in_bindings(*names: str) -> list[str]:
    return [f"csrc/bindings/{name}.cpp" for name in names]


class Build(BuildExtension):
    """Compiles what is below the bindings once, with the first module; the second links the same objects."""

    def build_extension(self, ext: Extension) -> None:
        root = Path(self.build_temp)
        self.build_temp = str(root / ext.name)  # bindings that both have differ by the name of the module
        if ext.name == TORCH:
            ext.extra_objects = [str((root / CORE / source).with_suffix(".o")) for source in below_bindings()]
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = str(root)


setup(
    ext_modules=[
        Extension(CORE, [*below_bindings(), *in_bindings(*CORE_BINDINGS, *SHARED_BINDINGS)], language="c++", **OPTIONS),
        CppExtension(TORCH, in_bindings(*TORCH_BINDINGS, *SHARED_BINDINGS), **OPTIONS),
    ],
    cmdclass={"build_ext": Build},
)
