# SPDX-License-Identifier: Apache-2.0
"""What stands out in the record of a save or a load: which rank, host or phase cost time. Reads no file."""
