# SPDX-License-Identifier: Apache-2.0
"""Writes what torch sees of a device, and what this build has for it. A step of ``run.py``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint


def main() -> int:
    """Returns 1 if the device or the code for it is missing, and needed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--needs-device", action="store_true")
    arguments = parser.parse_args()
    build = bytecheckpoint.build_info()
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "build": build, "device": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["devices"] = torch.cuda.device_count()
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["memory_gib"] = round(properties.total_memory / (1 << 30), 1)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    where = found["device"] or "torch sees no CUDA device"
    print(f"{where}; torch {found['torch']}, CUDA {found['cuda']}; device code: {', '.join(build['cuda']) or 'none'}")
    return 1 if arguments.needs_device and not (found["device"] and build["cuda"]) else 0


if __name__ == "__main__":
    sys.exit(main())
