# SPDX-License-Identifier: Apache-2.0
"""Checkpoints below a URL: the objects of a store, through obstore. Needs no torch."""
