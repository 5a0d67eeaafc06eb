# SPDX-License-Identifier: Apache-2.0
"""``python -m bytecheckpoint``."""

import sys

from bytecheckpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
