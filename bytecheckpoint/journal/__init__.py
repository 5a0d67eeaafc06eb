# SPDX-License-Identifier: Apache-2.0
"""What happens at the end of a save or a load: its line in the journal, its traces, and the calls of exporters."""
