# SPDX-License-Identifier: Apache-2.0
"""Who writes what: the inventories of ranks, their assignments, and the cache of plans for later saves."""
