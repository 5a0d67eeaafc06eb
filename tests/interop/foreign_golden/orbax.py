# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints of Orbax, on one process with four devices, into ``FOLDER/orbax-VERSION``.

    python3.12 -m venv /tmp/env && /tmp/env/bin/pip install orbax-checkpoint==0.12.8 jax==0.12.0.1 safetensors
    cd tests && /tmp/env/bin/python -m interop.foreign_golden.orbax FOLDER

``zarr2`` and ``zarr3`` are written without OCDBT, a folder an array; ``chunked`` is zarr3 with chunks that are smaller
than the shards of devices. ``ocdbt`` and ``manager`` (what CheckpointManager makes by default, two steps) are OCDBT,
which readers must refuse. There is no torch in this environment, so the values are in ``expected.safetensors``, by the
names of the tree joined with points. ``expected.json`` has what is no array.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from interop.foreign_golden.names import check_names

KINDS: dict[str, dict[str, bool]] = {
    "zarr2": {"use_ocdbt": False, "use_zarr3": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "chunked": {"use_ocdbt": False, "use_zarr3": True},
    "ocdbt": {"use_ocdbt": True, "use_zarr3": True},
}


def tree() -> dict[str, Any]:
    mesh = Mesh(numpy.array(jax.devices()).reshape(2, 2), ("x", "y"))

    def placed(array: Any, *axes: Any) -> Any:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def numbers(*shape: int) -> Any:
        return jnp.arange(numpy.prod(shape), dtype=jnp.float32).reshape(shape) / 2

    return {
        "params": {
            "dense": {"kernel": placed(numbers(8, 6), "x", "y"), "bias": placed(numbers(6), "y")},
            "rows": placed(numbers(8, 3), ("x", "y")),
            "half": placed(numbers(4, 6).astype(jnp.bfloat16), None, "y"),
            "same": placed(numbers(3, 5).astype(jnp.float16)),
            "count": placed(jnp.arange(8, dtype=jnp.int32) - 4, "x"),
            "bytes": placed(jnp.arange(6, dtype=jnp.uint8)),
            "flags": placed(jnp.array([True, False, True])),
            "zeros": placed(jnp.zeros((4, 4)), "x"),  # chunks of zeros alone
            "scalar": jnp.float32(2.5),
        },
        "layers": [{"weight": numbers(2, 2)}, {"weight": numbers(2, 2) + 1}],
        "opt": (jnp.int32(7), {"mu": numbers(3)}),
        "numpy": numpy.arange(5, dtype=numpy.int64),
        "empty": {},
        "none": None,
        "step": 7,
        "rate": 0.25,
        "name": "golden",
    }


def expected(folder: Path, saved: Any) -> None:
    """Writes what a reader is to find; arrays are brought from the devices."""
    arrays, others = {}, {}
    for path, value in jax.tree_util.tree_flatten_with_path(saved, is_leaf=lambda leaf: leaf is None)[0]:
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)
        if isinstance(value, jax.Array | numpy.ndarray | numpy.generic):
            arrays[name] = numpy.ascontiguousarray(numpy.asarray(value)).reshape(numpy.shape(value))
        else:
            others[name] = value
    save_file(arrays, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(others, indent=1, sort_keys=True) + "\n")


def save(kind: str, folder: Path) -> None:
    if kind == "manager":
        manager = ocp.CheckpointManager(folder / "checkpoint", options=ocp.CheckpointManagerOptions(max_to_keep=2))
        for step in (1, 2):
            manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(tree()["params"])))
        manager.wait_until_finished()
        manager.close()
        return
    args: dict[str, Any] = {}
    if kind == "chunked":
        args["save_args"] = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=16), tree())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**KINDS[kind])) as checkpointer:
        checkpointer.save(folder / "checkpoint", args=ocp.args.PyTreeSave(tree(), **args))


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    for kind in sys.argv[2:] or [*KINDS, "manager"]:
        folder = root / f"orbax-{ocp.__version__}" / kind
        folder.mkdir(parents=True)
        expected(folder, tree()["params"] if kind == "manager" else tree())
        save(kind, folder)
        for path in folder.rglob("commit_success.txt"):
            path.write_text(path.read_text().replace(str(root), "/golden"))  # it says where the checkpoint was made
    check_names(root)


if __name__ == "__main__":
    main()
