# SPDX-License-Identifier: Apache-2.0
"""What the package relies on in torch and in frameworks. Each item is stated once, and checked before use."""
