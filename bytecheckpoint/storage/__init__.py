# SPDX-License-Identifier: Apache-2.0
"""Places of checkpoints: folders of file systems and of object stores, and what is done in them. Needs no torch."""
