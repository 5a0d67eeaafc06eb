# SPDX-License-Identifier: Apache-2.0
"""The stager: what ``dcp.async_save`` does before it returns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bytecheckpoint import _C
from bytecheckpoint._described import described
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._calls import ASYNC_SAVE, call_in, local_of_call
from bytecheckpoint.dcp._staged import StagedState, stage_state
from bytecheckpoint.probes.of_torch import DCP_ASYNC_SAVE, PROCESS_MODE
from bytecheckpoint.probes.probe import require

__all__ = ["BcpStager"]


class BcpStager(AsyncStager):
    """Copies a state into memory that the process keeps for it, so that training can go on while it is saved.

    For ``async_stager`` of ``dcp.async_save``, with any ``StorageWriter``, in a thread or a process. Local: no rank
    waits for another. The state is saved as it was at the call: tensors and objects may change as soon as it returns.
    All stagers of a process share one arena, which they do not give back; ``bytecheckpoint.shutdown`` does.

    Args:
        overlap: ``stage`` returns a future, and ``async_save`` an ``AsyncSaveResponse``: tensors on devices may change
            only after ``staging_completion``. Host tensors and objects are copied before the call returns. None takes
            ``config.overlap_staging``.
        config: Settings; ``None`` reads ``BYTECHECKPOINT_*`` variables now. With ``staging_bytes`` the arena is made
            ready in the background from now on.

    Raises (``stage``): ``StagingFullError``, ``StagingBusyError``, ``InvalidPlanError`` (names the key),
    ``DeviceError``, ``UnsupportedError`` (this torch is built otherwise); with ``overlap`` a device may also refuse
    later, and the future fails.
    """

    _synchronize_after_execute: bool = True

    def __init__(self, overlap: bool | None = None, *, config: Config | None = None) -> None:
        self.config = config or Config.from_env()
        self.overlap = self.config.overlap_staging if overlap is None else overlap
        if self.config.staging_bytes:
            _C.prepare_arena(num_bytes=self.config.staging_bytes, is_shareable=False)

    def __repr__(self) -> str:
        return described(self, overlap=False)

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> StagedState | Future[Any]:
        """A copy of ``state_dict`` in host memory; with ``overlap``, a future of it.

        Args:
            state_dict: As DCP takes it; tensors on any device.
            kwargs: Ignored, as those of DCP's own stagers may be passed.
        """
        staged = stage_state(state_dict, self.config, is_shareable=_is_for_process(), overlap=self.overlap)
        return staged if self.overlap else staged.result()

    def synchronize_staging(self) -> None:
        """Nothing: what ``stage`` has not copied when it returns is for the future to wait for."""

    def close(self) -> None:
        """Nothing: the arena is the process's, and stays warm for the next save."""


def _is_for_process() -> bool:
    """Whether the call of ``dcp.async_save`` that this thread is in saves in a process of its own."""
    if call_in(*ASYNC_SAVE) is None:
        return False
    require(DCP_ASYNC_SAVE)
    is_for_process = bool(local_of_call(*ASYNC_SAVE, "async_checkpointer_type") == AsyncCheckpointerType.PROCESS)
    if is_for_process:
        require(PROCESS_MODE)
    return is_for_process
