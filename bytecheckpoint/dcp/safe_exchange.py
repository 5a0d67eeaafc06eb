# SPDX-License-Identifier: Apache-2.0
"""DCP's exchanges between ranks, with failures sent in a form that each rank can read.

DCP pickles the exception of a hook as it is. One that cannot be pickled ends the exchange on its rank alone, one that
cannot be unpickled ends it on the receiver alone, and the other ranks wait for them.

Plans are exchanged again, with all their items, if the coordinator lacks some: see ``whole_plans``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from traceback import StackSummary
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from bytecheckpoint.compat.private_names import Absent
from bytecheckpoint.dcp.whole_plans import SEND_WHOLE, are_lacking, whole, with_answers
from bytecheckpoint.distributed.parcel import Parcel
from bytecheckpoint.probes.probe import find

__all__ = ["IS_FOUND", "DistWrapper", "SafeWrapper", "send_failures_safely"]

DistWrapper: Any = find("torch.distributed.checkpoint.utils:_DistWrapper", Absent)
IS_FOUND = DistWrapper is not Absent


class SafeWrapper(DistWrapper):  # type: ignore[misc]
    """DCP's exchanges. It begins without state of its own, so an object of DCP's class can become one of this class."""

    def gather_object(self, object: Any) -> Any:
        if isinstance(object, SavePlan | LoadPlan):
            self._plan = object = with_answers(object)
        gathered = self._gather(self._sent(object))
        if are_lacking(gathered or ()):
            self._scatter([SEND_WHOLE] * len(gathered))
            gathered = self._gather(self._sent(whole(object)))
        return gathered

    def all_gather_object(self, object: Any) -> Any:
        return super().all_gather_object(self._sent(object))

    def scatter_object(self, object_list: Any) -> Any:
        result = self._scatter(self._all_sent(object_list))
        own = self.__dict__.pop("_plan", None)
        if isinstance(result, str) and result == SEND_WHOLE:  # on all ranks but the coordinator
            self._gather(self._sent(whole(own)))
            result = self._scatter(None)
        return result

    def broadcast_object(self, object: Any) -> Any:
        sent = self._sent(object)
        received = super().broadcast_object(sent)
        # torch leaves on the sender what it sends.
        return pickle.loads(pickle.dumps(sent)) if received is sent is not object else received

    def _gather(self, sent: Any) -> Any:
        return super().gather_object(sent)

    def _scatter(self, sent: Any) -> Any:
        return super().scatter_object(sent)

    def _sent(self, value: Any) -> Any:
        return _readable(value) if self.use_dist else value

    def _all_sent(self, values: Any) -> Any:
        # If the call fails, all ranks get one object.
        sent = {id(value): self._sent(value) for value in values or ()}
        return values and [sent[id(value)] for value in values]


def send_failures_safely(variables: Mapping[str, Any]) -> None:
    """Makes a call of DCP's flow send failures safely. Our entry points, and calls after ``register()``, do so anyway.

    Args:
        variables: Local variables of the call.
    """
    wrapper = variables.get("distW")
    if type(wrapper) is DistWrapper:
        wrapper.__class__ = SafeWrapper


def _readable(value: Any) -> Any:
    """Returns ``value``, which DCP is about to send, with each exception in it made a ``Parcel``."""
    if isinstance(value, CheckpointException):
        failures: Any = {rank: (Parcel(error), _plain(stack)) for rank, (error, stack) in value.failures.items()}
        return CheckpointException(value.args[0], failures)
    # DCP wraps the exception of a hook in such a tuple.
    if isinstance(value, tuple) and [*map(type, value)][1:] == [StackSummary] and isinstance(value[0], BaseException):
        error, stack = value
        return Parcel(error), _plain(stack)
    return value


def _plain(stack: Any) -> Any:
    """Returns ``stack`` without code objects, which cannot be pickled. Python 3.13 keeps them there."""
    if not isinstance(stack, StackSummary):
        return None
    return StackSummary.from_list([(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in stack])
