# SPDX-License-Identifier: Apache-2.0
"""States that are copied out of training's memory: how they are copied, how long they stay, and background saves."""
