# SPDX-License-Identifier: Apache-2.0
"""``BcpStager``, which copies a state before ``dcp.async_save`` returns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager

from bytecheckpoint.calls.of_dcp import AsyncSaveCall
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp.save_planner import stores_parts, to_stage
from bytecheckpoint.native import _C
from bytecheckpoint.probes.of_torch import DCP_ASYNC_SAVE, PROCESS_MODE
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.staging.staged_state import StagedState, note_upload, stage_state

__all__ = ["BcpStager"]


class BcpStager(AsyncStager):
    """Copies a state into memory that the process keeps, so that training can go on while the state is saved.

    Pass it to ``dcp.async_save`` as ``async_stager``. It works with any ``StorageWriter``, and with saves in a thread
    or in a process. Staging is local: no rank waits for another. The state is saved as it was at the call, so tensors
    and objects may change as soon as the call returns. All stagers of a process share one arena of memory, which stays
    allocated until ``bytecheckpoint.shutdown``.

    Args:
        overlap: True makes ``stage`` return a future, and ``async_save`` an ``AsyncSaveResponse``. Tensors on devices
            may then change only after ``staging_completion``. Host tensors and objects are copied before the call
            returns. None takes ``config.overlap_staging``.
        config: Settings. ``None`` reads the ``BYTECHECKPOINT_*`` variables when the stager is made. If
            ``staging_bytes`` is set, a background thread begins to prepare the arena at once.
    """

    _synchronize_after_execute: bool = True

    def __init__(self, overlap: bool | None = None, *, config: Config | None = None) -> None:
        self.config = config or Config.from_env()
        self.overlap = self.config.overlap_staging if overlap is None else overlap
        self._default_planner: SavePlanner | None = None  # of a save that is passed none
        if self.config.staging_bytes:
            _C.prepare_arena(num_bytes=self.config.staging_bytes, is_shareable=False)

    def __repr__(self) -> str:
        return described(self, overlap=False)

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> StagedState | Future[Any]:
        """Returns a copy of ``state_dict`` in host memory; with ``overlap``, a future of it.

        Args:
            state_dict: State dict as ``dcp.async_save`` takes it, with tensors on any device.
            kwargs: Ignored. Arguments of DCP's own stagers may be passed.

        Raises:
            StagingFullError: The state does not fit into the memory for it. Nothing was copied.
            StagingBusyError: States that are being saved, or that somebody keeps, take the memory. See
                ``Config.on_staging_busy``.
            InvalidPlanError: A value cannot be copied. The message names the key.
            DeviceError: A device refused. With ``overlap`` a device may also refuse later; then the future fails.
            UnsupportedError: This version of torch lacks what staging relies on.
        """
        return self._stage(state_dict, self, is_own=_hooks.are_own(self, "stage"))

    def _stage(self, state_dict: dict[str, Any], stager: object, *, is_own: bool) -> StagedState | Future[Any]:
        """Stages on behalf of ``stager``, a writer or a stager.

        Args:
            state_dict: State dict as ``stage`` takes it.
            stager: Object whose ``stage`` DCP called.
            is_own: True if ``stager.stage`` is our own method. A method of the user may keep the state, so its memory
                is not reused at the end of the save.
        """
        call = AsyncSaveCall.of_thread()
        if call is not None:
            require(DCP_ASYNC_SAVE)
            if call.is_for_process:
                require(PROCESS_MODE)
        planner = self._default_planner if call is None or call.planner is None else call.planner
        staged = stage_state(
            to_stage(state_dict, planner),
            self.config,
            is_shareable=call is not None and call.is_for_process,
            overlap=self.overlap,
            is_for_one_save=is_own and call is not None and call.stager is stager,
            async_save=call,
            in_parts=lambda _: stores_parts(planner),
        )
        return staged if self.overlap else staged.result()

    def synchronize_staging(self) -> None:
        """Notes when the save ends. ``dcp.async_save`` calls it when it has begun to save.

        It does not wait for copies that still run after ``stage``: wait for the future of ``stage`` instead.
        """
        note_upload()

    def close(self) -> None:
        """Does nothing: the arena belongs to the process, and stays ready for the next save."""


_hooks = Hooks(BcpStager)
