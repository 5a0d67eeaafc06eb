# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the state of every optimizer that is installed, and prints what came back, as tables in Markdown.

An optimizer trains a small model on the CPU, is saved in three ways, and is loaded into a new model and optimizer of
another seed: by ``bytecheckpoint.save`` and ``load`` with the live optimizer, and by ``save_state_dict`` and
``load_state_dict`` with what ``optimizer.state_dict()`` or torch's ``get_optimizer_state_dict`` returns. State dicts
are compared exactly (classes, dtypes, shapes, strides, placements, bytes), and so are they after two more steps. Stock
DCP saves and loads the same, as the control. All of it runs again under FSDP2 on two gloo ranks.

Packages that are not installed are named at the end; ``make .venv/.optimizers`` installs those of the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.ranks import RanksFailed, forked_with, run_ranks

from optimizers.packages import MODULES, NO_FOREACH, SHORT, optimizers_of, short_names, versions
from optimizers.tables import faults, report
from optimizers.trained import Recipe
from optimizers.trials import Trial, tried

__all__ = ["forked_with_packages", "survey"]

LIMIT_S = 90.0


def survey(names: Sequence[str]) -> Iterator[tuple[Trial, Trial | None]]:
    """Yields the trial of each optimizer in one process, and under FSDP2; None if it could not be used in one."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            plain = _run(1, name, f"{folder}/plain", None)
            yield plain, _sharded(name, folder, plain.recipe) if plain.recipe and not plain.unusable else None


def _sharded(name: str, folder: str, recipe: Recipe) -> Trial:
    """Returns the trial under FSDP2. DTensors lack many of the operations by which optimizers step on lists."""
    first = _run(2, name, f"{folder}/fsdp2", recipe)
    if not first.unusable or recipe.make not in ("parameters", "lr"):
        return first
    second = _run(2, name, f"{folder}/no_foreach", dataclasses.replace(recipe, make=NO_FOREACH))
    return first if second.unusable else second


def forked_with_packages(modules: Collection[str]) -> contextlib.AbstractContextManager[None]:
    """Within this context, ranks are forked from a server that has imported these modules, which takes seconds."""
    return forked_with("optimizers.trials", *sorted(modules))


def _run(num_ranks: int, name: str, folder: str, recipe: Recipe | None) -> Trial:
    try:
        of_ranks = run_ranks(num_ranks, tried, name, folder, recipe, limit_s=LIMIT_S)
    except RanksFailed as error:
        return Trial(name, recipe, unusable=f"RanksFailed: {str(error).strip().splitlines()[-1]}")
    # What a way made of it is the same on all ranks, as the trial takes care of. Not so what makes it end early.
    return next((trial for trial in of_ranks if trial.unusable), of_ranks[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODULE[:CLASS]", help="only these, such as torch.optim:Adam")
    parser.add_argument("--short", action="store_true", help="only the optimizers of the test in make torture")
    parser.add_argument("--json", type=Path, help="write every attempt to this file")
    arguments = parser.parse_args()
    names, missing = wanted(arguments.names, arguments.short)
    modules = {name.split(":")[0] for name in names}
    pairs = []
    with forked_with_packages(modules):
        for pair in survey(names):
            pairs.append(pair)
            print(f"{len(pairs)}/{len(names)} {pair[0].name}", file=sys.stderr, flush=True)
            if arguments.json:
                kept = [[dataclasses.asdict(trial) if trial else None for trial in each] for each in pairs]
                arguments.json.write_text(json.dumps(kept, default=sorted))
    plain, sharded = [pair[0] for pair in pairs], [pair[1] for pair in pairs if pair[1] is not None]
    print(report(plain, sharded))
    print("\nVersions: " + ", ".join(f"{name} {version}" for name, version in versions(modules).items()) + ".")
    for module, reason in missing.items():
        print(f"Not tried: {module} ({reason}).")
    found = faults([*plain, *sharded])
    print("\n".join(["", "FAULTS", *found]) if found else "\nNo state differs by a fault of ours.")
    return 1 if found else 0


def wanted(names: list[str], is_short: bool) -> tuple[list[str], dict[str, str]]:
    """Returns the optimizers to try, and the modules that cannot be imported, with the reason."""
    if is_short:
        return [name for module in SHORT for name in short_names(module)], {}
    asked = {name.split(":")[0] for name in names}
    found: list[str] = []
    missing: dict[str, str] = {}
    for module in MODULES:
        if asked and module not in asked:
            continue
        try:
            found += [f"{module}:{name}" for name in optimizers_of(module)]
        except ImportError as error:
            missing[module] = str(error)
    if names:
        found = [each for each in found if each in names or each.split(":")[0] in names]
    return found, missing


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling a step takes longer than everything else
    sys.exit(main())
