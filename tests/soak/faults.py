"""Injects faults into running tasks and prints the outcomes.

    python -m tests.soak.faults --faults 200 --seed 0 --out faults.json

Started again with the same file, it goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.soak.chains import Chain, run_chain
from tests.soak.runs import SETUPS, Setup
from tests.soak.sabotage import Fault

MOST_PROBLEMS = 10
"""The soak ends after this many unexpected outcomes."""


class Results:
    """All faults and chains so far, in a file that is complete after each of them."""

    def __init__(self, file: Path, seed: int) -> None:
        self.file = file
        self.faults: list[dict[str, Any]] = []
        self.chains: list[dict[str, Any]] = []
        self.seed = seed
        self.seconds = 0.0
        if file.exists():
            old = json.loads(file.read_text(encoding="utf-8"))
            self.faults, self.chains, self.seconds = old["faults"], old["chains"], old["seconds"]
        self.begun = time.monotonic() - self.seconds

    def add(self, fault: dict[str, Any]) -> None:
        """Record the outcome of a fault."""
        self.faults.append(fault)
        self.save()
        bad = f"  UNEXPECTED {fault['problems'][0][:300]}" if fault["problems"] else ""
        print(
            f"{len(self.faults):4d} {time.monotonic() - self.begun:6.0f} s  {fault['chain']}  {fault['kind']} worker "
            f"{fault['victim']} {fault['moment']}  {fault['seconds']} s  {fault['codes']}  "
            f"{fault['before'][-1:]} -> {fault['after'][-1:]}{bad}",
            flush=True,
        )

    def save(self) -> None:
        """Write the file atomically."""
        self.seconds = round(time.monotonic() - self.begun, 1)
        content = {
            "seed": self.seed, "seconds": self.seconds, "faults": self.faults,
            "chains": self.chains,
        }  # fmt: skip
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.file)

    def tried(self) -> Counter[tuple[str, str]]:
        """How often each kind was tried at each moment."""
        return Counter((fault["kind"], fault["moment"]) for fault in self.faults)

    @property
    def unexpected(self) -> int:
        """Number of faults and chains with an unexpected outcome."""
        return sum(bool(fault["problems"]) for fault in self.faults) + sum(not c["bitwise"] for c in self.chains)

    @property
    def problems(self) -> list[str]:
        """The problems of all faults and chains."""
        found = [f"{f['chain']} launch {f['launch']}: {problem}" for f in self.faults for problem in f["problems"]]
        return found + [f"{c['chain']} ({c['setup']}): {c['differences']}" for c in self.chains if not c["bitwise"]]


def soak(
    file: Path, work: Path, faults: int, seed: int, setups: Sequence[Setup] = SETUPS, most: int = MOST_PROBLEMS
) -> Results:
    """Inject at least `faults` faults, in runs of `setups` in turn, and compare each run with an undisturbed one.

    Args:
        file: results; those that are in it already count.
        work: folder for the runs, kept where something is wrong.
        faults: how many.
        seed: of the faults.
        setups: what runs.
        most: problems after which it stops.
    """
    results = Results(file, seed)
    tried = results.tried()
    number = len({fault["chain"] for fault in results.faults} | {chain["chain"] for chain in results.chains})
    while len(results.faults) < faults and results.unexpected < most:
        folder = work / f"chain-{number:03d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        dice = random.Random(f"{seed} {number}")
        chain = Chain(setups[number % len(setups)], folder, work, dice, tried, results.add)
        results.chains.append(run_chain(chain, functools.partial(_plan, chain, results, faults, most)))
        results.save()
        print(f"     {results.chains[-1]}", flush=True)
        number += 1
    return results


def _plan(chain: Chain, results: Results, faults: int, most: int) -> list[Fault]:
    enough = len(results.faults) >= faults or results.unexpected >= most
    return [] if enough else chain.draw()


def table(results: Results) -> str:
    """One row for each kind of fault and moment, as Markdown."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for fault in results.faults:
        rows.setdefault((fault["kind"], fault["moment"]), []).append(fault)
    lines = [
        "| What | When | How often | Tasks | Workers | Others ended after | Outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kind, moment), faults in sorted(rows.items()):
        seconds = [fault["seconds"] for fault in faults if fault["seconds"] is not None]
        took = f"{min(seconds):.1f} to {max(seconds):.1f} s" if seconds else "–"
        bad = [fault for fault in faults if fault["problems"]]
        outcome = f"{len(bad)} of them otherwise than expected" if bad else OUTCOMES.get(kind, OUTCOMES["kill"])
        tasks = ", ".join(sorted({fault["task"] for fault in faults}))
        workers = ", ".join(map(str, sorted({fault["workers"] for fault in faults})))
        lines.append(f"| {kind} | {moment} | {len(faults)} | {tasks} | {workers} | {took} | {outcome} |")
    same = [chain for chain in results.chains if chain["bitwise"]]
    by_task = Counter(chain["task"] for chain in same)
    lines.append("")
    lines.append(
        f"{len(results.faults)} faults in {len(results.chains)} runs; {len(same)} of the runs ended bit by bit like an "
        f"undisturbed one ({', '.join(f'{task} {count}' for task, count in sorted(by_task.items()))}); "
        f"{results.unexpected} unexpected outcomes; {results.seconds:.0f} s."
    )
    return "\n".join(lines)


OUTCOMES = {
    "kill": "others named it and ended; resumed",
    "kill_all": "resumed",
    "stop": "others named it and ended; resumed",
    "pause": "went on",
    "raise": "others named it and ended; resumed",
    "disk_full": "all ended by one error, older checkpoint kept; resumed",
    "altered file": "refused by one error that names the file; resumed from another or the restored one",
    "truncated file": "passed over; resumed from the one before",
    "damaged manifest": "passed over; resumed from the one before",
    "folder not writable": "all ended by one error, older checkpoint kept; resumed",
    "SIGTERM": "all stopped at one step with a complete checkpoint; resumed",
    "SIGUSR1": "all stopped at one step with a complete checkpoint; resumed",
}


def main() -> None:
    """Inject faults, print the table, and fail if there was a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="results; goes on with those in it")
    parser.add_argument("--work", type=Path, help="folder for the runs (default: a temporary one)")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    options = parser.parse_args()
    if options.table:
        print(table(Results(options.out, options.seed)))
        return
    work = options.work or Path(tempfile.mkdtemp(prefix="soak-"))
    results = soak(options.out.resolve(), work.resolve(), options.faults, options.seed)
    print(table(results))
    for problem in results.problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    sys.exit(1 if results.problems else 0)


if __name__ == "__main__":
    main()
