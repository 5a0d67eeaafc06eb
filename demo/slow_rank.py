# SPDX-License-Identifier: Apache-2.0
"""Saves a run with four ranks, of which one becomes slow, and lets the journal say which one, in which phase, and why.

Five saves are healthy. In the sixth, one rank writes to slow storage, holds more bytes than the others, or comes late.
Nothing tells the report which. The exit status is 0 if and only if the rank and its phase are named, and the healthy
saves name nobody.

    python demo/slow_rank.py --kind storage
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from bytecheckpoint.observability import findings, read_journal

# The slow ranks are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.ending_ranks import EndingRanks
from support.slow_ranks import FINDING_OF, save_steps

NUM_HEALTHY = 5


def show(run: Path, kind: str, slow: int) -> bool:
    """Saves the run, and prints what each save says. Returns whether that is what happened."""
    with closing(EndingRanks()) as ranks:
        save_steps(ranks, run, range(NUM_HEALTHY))
        save_steps(ranks, run, [NUM_HEALTHY], kind=kind, slow=slow)
    records, _ = read_journal(run)
    is_right = len(records) == NUM_HEALTHY + 1
    for number, record in enumerate(records):
        found = findings(record, records[:number])
        print(f"{record['path']}: {record['report']['total_s'] * 1e3:.0f} ms")
        for finding in found:
            print(f"  {finding.text}" + (f"; {finding.advice}" if finding.advice else ""))
        named = [(each.rank, each.kind, each.phase) for each in found if each.kind in dict(FINDING_OF.values())]
        is_right = is_right and named == ([(slow, *FINDING_OF[kind])] if number == NUM_HEALTHY else [])
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*FINDING_OF], default="storage", help="in which way the rank is slow")
    parser.add_argument("--rank", type=int, choices=range(4), default=2, help="which rank is slow")
    parser.add_argument("--dir", type=Path, help="folder of the run, which is kept; else a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-rank-") as folder:
        run = arguments.dir or Path(folder)
        run.mkdir(parents=True, exist_ok=True)
        is_right = show(run, arguments.kind, arguments.rank)
    print(
        f"rank {arguments.rank} was slow ({arguments.kind}): " + ("named" if is_right else "NOT NAMED AS IT SHOULD BE")
    )
    if arguments.dir:
        print(f"bcp report {arguments.dir} makes a page of it")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
