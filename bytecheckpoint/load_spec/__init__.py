# SPDX-License-Identifier: Apache-2.0
"""What to load from a checkpoint, under which names, in which form: one description for every call and tool."""
