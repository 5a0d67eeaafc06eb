# SPDX-License-Identifier: Apache-2.0
"""The classes that plug into ``torch.distributed.checkpoint``."""
