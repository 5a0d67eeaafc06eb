# SPDX-License-Identifier: Apache-2.0
"""Trains with one optimizer, saves and loads it in every way, and says what came back."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError
from optimizers.trained import Recipe, Trained, recipe_of, step_of_zeros
from optimizers.ways import LIVE, OWN, TORCH, InMemory, Way, stock_ways, ways

__all__ = ["FRESH", "SAME", "TRAINED", "TRUSTED", "ZEROS", "Attempt", "Trial", "tried"]

T = TypeVar("T")
Load = Callable[..., None]  # of a model and an optimizer

NUM_STEPS = 3
NUM_MORE = 2

SAME = "bit for bit"
# Warnings of ours that a state is lost.
_WARNS = re.compile("only a part of|ranks hold different copies")
TRUSTED = ", with allow_pickle=True"


def _zeros(target: Trained) -> None:
    target.begin()
    step_of_zeros(target)


def _train(target: Trained) -> None:
    target.begin()
    target.train(range(100, 101))


# What is loaded into.
FRESH = "new"
ZEROS = "after a step of zeros"
TRAINED = "after a step of training"
_INTO: dict[str, Callable[[Trained], None]] = {
    FRESH: lambda target: None,
    ZEROS: _zeros,
    TRAINED: _train,
}


@dataclass(frozen=True)
class Attempt:
    """What one way made of a save and a load into one kind of target.

    Attributes:
        outcome: ``SAME``, or what was raised, or what differs.
        kind: "same"; "refused" for an error of ours, "raised" for another; "differs"; "next step" if only that differs;
            "no target" if there was nothing to load into; "changed by the save".
        warning: What our load warned of.
    """

    kind: str
    outcome: str
    warning: str = ""


@dataclass
class Trial:
    """What happened with one optimizer under one wrapping.

    Attributes:
        unusable: Why nothing could be tried; else empty.
        is_repeatable: Whether the same training, run again, has the same result.
        is_alike: Whether what the optimizer keeps outside DTensors is the same on all ranks.
        attempts: By way, and by what was loaded into. A way ends with the first that came back.
        stock: The same with stock DCP. For ``LIVE`` it is a copy of ``optimizer.state_dict()`` without a checkpoint.
        warned: Our ways in which the save warned of copies that differ between ranks.
    """

    name: str
    recipe: Recipe | None = None
    unusable: str = ""
    is_repeatable: bool = True
    is_alike: bool = True
    attempts: dict[str, dict[str, Attempt]] = field(default_factory=dict)
    stock: dict[str, dict[str, Attempt]] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)


def tried(name: str, folder: str, recipe: Recipe | None = None) -> Trial:
    """Runs the trial of an optimizer, on each rank of the default group.

    Args:
        name: ``module:class``.
        folder: Where checkpoints are written.
        recipe: How it is made and steps. If given, the model is sharded by FSDP2.
    """
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = Trial(name, recipe)
        try:
            trial.recipe = recipe or recipe_of(name)
            _run(trial, folder, is_sharded=recipe is not None)
        except Exception as error:
            trial.unusable = text_of(error)
        finally:
            bytecheckpoint.shutdown()
        return trial


def _run(trial: Trial, folder: str, is_sharded: bool) -> None:
    recipe = trial.recipe
    assert recipe is not None

    def trained(num_steps: int) -> Trained:
        one = recipe.made(0, is_sharded)
        one.begin()
        one.train(range(num_steps))
        return one

    saver = trained(NUM_STEPS)
    before = saver.described()
    trial.is_alike = _is_alike(before["optimizer"])
    after = trained(NUM_STEPS + NUM_MORE).described()
    trial.is_repeatable = not _of_any_rank(trained(NUM_STEPS + NUM_MORE).differs_from(after))
    for key, attempts, is_whole, load in _saved(trial, saver, before, folder, "fsdp2" if is_sharded else "ddp"):
        targets = [each for each in _INTO if key != OWN or each != FRESH]  # its state dict has no state to load into
        for trusted in (False, True):
            for into in targets:
                steps = _steps(
                    recipe.made(1, is_sharded),
                    _INTO[into],
                    functools.partial(load, trusted=trusted),
                    before,
                    after if trial.is_repeatable else None,
                )
                attempt = attempts[into + TRUSTED * trusted] = _attempted(steps)
                if attempt.kind == "same" and not is_whole:
                    break
            kinds = {attempt.kind for attempt in attempts.values()}
            if "same" in kinds or not any("allow_pickle" in attempt.outcome for attempt in attempts.values()):
                break


def _saved(
    trial: Trial, saver: Trained, before: dict[str, Any], folder: str, framework: str
) -> Iterator[tuple[str, dict[str, Attempt], bool, Load]]:
    """Saves in every way, and yields each that succeeded, its attempts, whether all targets are tried, its load."""
    ours, stock = ways(framework), stock_ways()
    # torch's function comes last: it makes some optimizers take a step.
    every: list[tuple[dict[str, dict[str, Attempt]], str, Way]] = [
        (trial.attempts, LIVE, ours[LIVE]),
        (trial.stock, LIVE, InMemory()),
        *(
            (found, key, way[key])
            for key in (OWN, TORCH)
            for found, way in ((trial.attempts, ours), (trial.stock, stock))
        ),
    ]
    for number, (found, key, way) in enumerate(every):
        path = f"{folder}/{number}"

        def save(way: Way = way, path: str = path) -> str:
            way.save(path, saver.model, saver.optimizer)
            return ""

        steps = (("save", save), ("changed by the save", lambda: saver.differs_from(before)))
        failed = _attempted(steps)
        found[key] = {} if failed.kind == "same" else {"save": failed}
        if found is trial.attempts and _of_any_rank(failed.warning):
            trial.warned.add(key)
        if failed.kind == "same":
            yield key, found[key], found is trial.attempts and key == LIVE, functools.partial(way.load, path)


def _steps(
    target: Trained,
    prepare: Callable[[Trained], None],
    load: Load,
    before: dict[str, Any],
    after: dict[str, Any] | None,
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the steps of an attempt: what each is called, and what runs it and returns what differs then."""

    def nothing(call: Callable[..., object], *args: object) -> str:
        call(*args)
        return ""

    yield "no target", lambda: nothing(prepare, target)
    yield "load", lambda: nothing(load, target.model, target.optimizer)
    yield "differs", lambda: target.differs_from(before)
    if after is not None:
        yield "next step", lambda: nothing(target.train, range(NUM_STEPS, NUM_STEPS + NUM_MORE))
        yield "next step", lambda: target.differs_from(after)


def _attempted(steps: Iterable[tuple[str, Callable[[], str]]]) -> Attempt:
    """Runs steps up to the first that raises, or says what differs, on any rank."""
    warning = ""
    for kind, step in steps:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome = step()
            except (Exception, CheckpointException) as error:
                cause = _cause(error)
                outcome = text_of(cause)
                if kind in ("save", "load"):
                    kind = "refused" if isinstance(cause, CheckpointError) else "raised"
        if kind in ("save", "load"):
            warning = next((str(each.message) for each in caught if _WARNS.search(str(each.message))), "")
        kind, outcome = _of_any_rank((kind, outcome) if outcome else None) or ("", "")
        if outcome:
            return Attempt(kind, outcome, warning)
    return Attempt("same", SAME, warning)


def _of_any_rank(value: T) -> T:
    """Returns the value of the first rank that has one. Ranks that went on by themselves would wait for each other."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    return next((each for each in of_ranks if each), value)


def _is_alike(state: dict[str, Any]) -> bool:
    """Whether all ranks hold the same plain values and plain tensors."""

    def plain(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return "a DTensor" if "placements" in value else {key: plain(each) for key, each in value.items()}

    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, plain(state))
    return all(each == of_ranks[0] for each in of_ranks)


def _cause(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def text_of(error: BaseException) -> str:
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0][:400]}"
