# SPDX-License-Identifier: Apache-2.0
"""Builds the extension modules: `_core` without torch, `_C` with. Everything else is in pyproject.toml.

Device code is compiled into `_C` if nvcc is there, whether or not torch has CUDA. BCP_BUILD_CUDA=0 leaves it out, =1
makes its absence an error.
"""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from setuptools import Extension, setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as error:
    # pip builds in an environment of its own unless it is told not to, and would build for a torch of its choice.
    raise SystemExit(
        "bytecheckpoint is built for the torch that it will run with, and there is none here. Install torch, then: "
        "pip install 'setuptools>=77' wheel ninja && pip install --no-build-isolation ."
    ) from error

ROOT = Path(__file__).parent
LAYERS = ("base", "tensor", "format", "planner", "io", "staging", "engine")
# What stands between Python and the engine, by module: `bridge` converts, `bindings` name what Python sees.
OF_BOTH = (
    "bridge/checkpoint",
    "bridge/errors",
    "bridge/python_store",
    "bridge/tree_caster",
    "bindings/bind_checkpoint",
    "bindings/bind_row_major",
    "bindings/bind_view",
    "bindings/bind_store",
    "bindings/bind_trace",
)
OF_CORE = (
    "bindings/bind_builtin",
    "bindings/bind_calls",
    "bindings/bind_copy",
    "bindings/bind_export",
    "bindings/bind_steps",
    "bindings/bind_verify",
    "bridge/callbacks",
    "bridge/standard_tensors",
    "bridge/standard_values",
)
BINDINGS_OF_TORCH = (
    "bindings/bind_changes",
    "bindings/bind_commit",
    "bindings/bind_load",
    "bindings/bind_save",
    "bindings/bind_save_plan",
    "bindings/bind_sharing",
    "bindings/bind_staging",
)
BRIDGE_OF_TORCH = (
    "bridge/chosen_keys",
    "bridge/copies_of_state",
    "bridge/dcp_objects",
    "bridge/dtensor_pieces",
    "bridge/flatten",
    "bridge/global_plan",
    "bridge/local_state",
    "bridge/read_plan",
    "bridge/staged_tree",
    "bridge/state_values",
    "bridge/tensor_memories",
    "bridge/tensor_parts",
    "bridge/tree_copy",
    "bridge/write_plan",
)
# What tests and benchmarks alone call, in a module of its own, that no ordinary build has.
OF_TESTING = (
    "testing/format",
    "testing/inventories",
    "testing/pickles",
    "testing/synthetic_checkpoint",
    "testing/synthetic_metadata",
    "testing/tiles",
    "bridge/errors",
    "bridge/tree_caster",
)

CORE_MODULE = "csrc/bindings/core_module.cpp"
TORCH_MODULE = "csrc/bindings/torch_module.cpp"
TESTING_MODULE = "csrc/testing/testing_module.cpp"
TORCH_TENSOR = "csrc/bridge/torch_tensor.cpp"  # the only one that sees torch

# Other builds than the one that is installed. Those with a macro link its objects, which must be there, in place of all
# that the macro does not change.
VARIANTS = {
    "": None,
    "failpoints": "BCP_FAILPOINTS",  # for the crash tests alone; the installed package has none
    "asan": None,  # all of it under AddressSanitizer and UBSan, bindings too: `make sanitize-python`
    "testing": None,  # the module for tests and benchmarks alone, from the objects of the ordinary build
}
VARIANT = os.environ.get("BCP_BUILD_VARIANT", "")
if VARIANT not in VARIANTS:
    raise SystemExit(f"BCP_BUILD_VARIANT={VARIANT}: {', '.join(filter(None, VARIANTS))} are what there is")
OLDEST_TORCH = (2, 10)
if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
    raise SystemExit(f"torch {torch.__version__} is too old: bytecheckpoint needs torch 2.10 or newer")
LINKS_ORDINARY = VARIANTS[VARIANT] is not None
# Not vptr: it compares type information, of which each library has its own with hidden names.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"] * (VARIANT == "asan")
# One place for them whatever command builds, pip's included, so that only what has changed is compiled.
OBJECTS = ROOT / "build" / "objects"

OPTIONS = {
    "include_dirs": [str(ROOT), str(Path(torch.__file__).parent / "include")],  # torch's has pybind11
    "define_macros": [("_GNU_SOURCE", None), *([(VARIANTS[VARIANT], None)] if LINKS_ORDINARY else [])],
    "extra_compile_args": [
        "-std=c++20",  # which the headers of newer torch need; the C++ tests compile the same as C++17
        "-O1" if VARIANT in ("failpoints", "asan") else "-O3",
        # Python's own flags ask for debug information: a fifth of the time, and a hundred megabytes. Reports of
        # sanitizers need lines.
        *(["-g1", "-fno-omit-frame-pointer", *SANITIZERS] if SANITIZERS else ["-g0"]),
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-fvisibility=hidden",
    ],
    "extra_link_args": ["-pthread", *SANITIZERS],
}

DEVICE_SOURCE = "csrc/staging/cuda_device_merge.cu"
NO_DEVICE_SOURCE = "csrc/staging/no_device_merge.cpp"  # stands in for it, in `_core` always
DEVICE_ARCHITECTURES = (80, 90, 100)  # and PTX of the last, for what comes after it

CORE, TORCH, TESTING = "bytecheckpoint._core", "bytecheckpoint._C", "bytecheckpoint._testing"


@cache
def find_nvcc() -> str | None:
    wish = os.environ.get("BCP_BUILD_CUDA", "")
    if wish == "0":
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = next((path for home in homes if (path := shutil.which("nvcc", path=f"{home}/bin"))), shutil.which("nvcc"))
    if found is None and wish == "1":
        raise SystemExit("BCP_BUILD_CUDA=1, but there is no nvcc in CUDA_HOME, CUDA_PATH or PATH")
    return None if found is None else str(Path(found).resolve())


def find_cudart(nvcc: str) -> Path:
    """The runtime, to be linked statically: torch has none without CUDA, and maybe one of another version with it."""
    # What is called nvcc may be a script elsewhere; where the toolkit is, nvcc itself says.
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False)
    tops = [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)]
    for top in tops:
        for folder in (*sorted(top.glob("targets/*/lib")), top / "lib64", top / "lib"):
            if (folder / "libcudart_static.a").exists():
                return folder / "libcudart_static.a"
    raise SystemExit(
        f"{nvcc} is there, but no libcudart_static.a beside it; BCP_BUILD_CUDA=0 builds without device code"
    )


def compile_device_code(nvcc: str, target: Path) -> None:
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    numbers = [number for number in DEVICE_ARCHITECTURES if f"compute_{number}" in known]
    if not numbers:
        raise SystemExit(f"{nvcc} compiles for none of {DEVICE_ARCHITECTURES}; BCP_BUILD_CUDA=0 builds without it")
    names = [*(f"sm_{number}" for number in numbers), f"compute_{numbers[-1]}"]
    codes = [(number, f"sm_{number}") for number in numbers] + [(numbers[-1], names[-1])]
    target.parent.mkdir(parents=True, exist_ok=True)
    host = ["-ccbin", os.environ["CXX"]] if os.environ.get("CXX") else []
    command = [
        *(nvcc, *host, "-c", DEVICE_SOURCE, "-o", str(target), "-std=c++17", "-O3", f"-I{ROOT}"),
        *(f"-gencode=arch=compute_{number},code={code}" for number, code in codes),
        *("-D_GNU_SOURCE", f'-DBCP_CUDA_ARCHITECTURES="{" ".join(names)}"'),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        # nvcc takes the assignment of a Status for one that is dropped (2810); the host's compiler sees what is.
        *("-diag-suppress", "2810", "--threads", "0"),
        "--compiler-options=-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unused-parameter",
    ]
    print(*command, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def unit(name: str, sources: Iterable[str]) -> str:
    """A source that includes `sources`. What they all include and instantiate is then compiled once: for the bindings
    that is four fifths of the time. The C++ tests compile each source by itself."""
    path = ROOT / "build" / "units" / f"{name}.cpp"
    text = "".join(f'#include "csrc/{source}.cpp"\n' for source in sources)
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(path.relative_to(ROOT))


def layer(name: str) -> str:
    csrc = ROOT / "csrc"
    sources = sorted(str(path.relative_to(csrc).with_suffix("")) for path in (csrc / name).rglob("*.cpp"))
    return unit(name, [source for source in sources if f"csrc/{source}.cpp" != NO_DEVICE_SOURCE])


# What all modules link. In a unit of the whole planner gcc inlines less, which made planning for 10,000 ranks 15 %
# slower (benchmarks/planning.py).
PLANNER = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / "planner").glob("*.cpp"))
UP_TO_ENGINE = [NO_DEVICE_SOURCE, *PLANNER, *(layer(name) for name in LAYERS if name != "planner")]


def has_failpoints(source: str) -> bool:
    """Whether the macro of the failpoints changes a source, or one that it includes."""
    text = (ROOT / source).read_text()
    included = re.findall(r'^#include "(csrc/.+[.]cpp)"', text, re.MULTILINE)
    return "failpoint" in text.lower() or any(map(has_failpoints, included))


def object_of(source: str, directory: Path) -> str:
    return str((directory / source).with_suffix(".o"))


class Build(BuildExtension):
    """Compiles what is below the bindings once, with the first module; the others link the same objects."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(OBJECTS if VARIANT in ("", "testing") else OBJECTS.with_name(VARIANT) / "objects")

    def build_extension(self, ext: Extension) -> None:
        root = Path(self.build_temp)

        def below(sources: Iterable[str]) -> list[str]:
            """Objects that the first module has compiled; of sources that this variant leaves as they are, by the
            ordinary build."""
            return [
                object_of(source, (OBJECTS if LINKS_ORDINARY and not has_failpoints(source) else root) / CORE)
                for source in sources
            ]

        self.build_temp = str(root / ext.name)  # bindings that both have differ by the name of the module
        if LINKS_ORDINARY:
            # The first of the bindings says what is in the build.
            own = [source for source in ext.sources if source.endswith("_module.cpp") or has_failpoints(source)]
            ext.extra_objects = [object_of(source, OBJECTS / ext.name) for source in ext.sources if source not in own]
            ext.sources = own
            if missing := [path for path in ext.extra_objects if not Path(path).exists()]:
                raise SystemExit(f"BCP_BUILD_VARIANT={VARIANT} needs the objects of the ordinary build: {missing[0]}")
        if ext.name == TESTING:
            ext.extra_objects += below(UP_TO_ENGINE)
        if ext.name == TORCH:
            nvcc = find_nvcc()
            ext.extra_objects += below(each for each in UP_TO_ENGINE if nvcc is None or each != NO_DEVICE_SOURCE)
            if nvcc is not None:
                device_code = Path(object_of(DEVICE_SOURCE, OBJECTS / TORCH))
                if not VARIANT:
                    compile_device_code(nvcc, device_code)
                ext.extra_objects += [str(device_code), str(find_cudart(nvcc))]
                # Its names stay inside: torch loads its own runtime with global names, maybe of another version.
                own = ["-Wl,--exclude-libs,libcudart_static.a", "-ldl", "-lrt"]
                ext.extra_link_args = [*ext.extra_link_args, *own]
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = str(root)


modules = [
    Extension(CORE, [*UP_TO_ENGINE, CORE_MODULE, unit("of_core", (*OF_BOTH, *OF_CORE))], language="c++", **OPTIONS),
    CppExtension(
        TORCH,
        [TORCH_MODULE, TORCH_TENSOR, unit("of_torch", (*OF_BOTH, *BINDINGS_OF_TORCH)), unit("bridge", BRIDGE_OF_TORCH)],
        **OPTIONS,
    ),
    Extension(TESTING, [TESTING_MODULE, unit("of_testing", OF_TESTING)], language="c++", **OPTIONS),
]
# torch promises no ABI between minor versions.
built_for = "torch=={}.{}.*".format(*torch.__version__.split("."))
own = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["own"]
with_testing = {"testing": [TESTING], "asan": [CORE, TORCH, TESTING]}

setup(
    ext_modules=[module for module in modules if module.name in with_testing.get(VARIANT, [CORE, TORCH])],
    cmdclass={"build_ext": Build},
    install_requires=[built_for, *own],
)
