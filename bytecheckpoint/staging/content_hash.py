# SPDX-License-Identifier: Apache-2.0
"""The library of hashes that tell whether tensors have changed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.native import _C

__all__ = ["load_content_hash"]

# The extension module of the package has XXH3 as the C library exports it; else the library of the system does.
_PACKAGE, _LIBRARY = "xxhash", "libxxhash.so.0"


def load_content_hash() -> None:
    """Loads the library for this process.

    Raises:
        ConfigError: There is none.
    """
    found = find_spec(_PACKAGE)
    folders = [] if found is None else found.submodule_search_locations or []
    errors = []
    for library in (*(str(file) for folder in folders for file in sorted(Path(folder).glob("*.so"))), _LIBRARY):
        try:
            _C.load_content_hash(library)
            return
        except CheckpointError as error:
            errors.append(str(error))
    raise ConfigError(f"Config(link_unchanged=True) needs the package xxhash: pip install xxhash ({'; '.join(errors)})")
