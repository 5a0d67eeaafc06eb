# SPDX-License-Identifier: Apache-2.0
"""Works with checkpoints as folders and files: steps, parts, verification, retention. Needs no torch."""
