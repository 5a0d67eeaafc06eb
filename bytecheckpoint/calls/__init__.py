# SPDX-License-Identifier: Apache-2.0
"""A call of DCP, or of ours, in progress: where it is found, when it has ended, what it does meanwhile."""
