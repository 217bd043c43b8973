"""Named behaviours of caches, kvtier's and others', seen on this machine: a table, JSON, a page.

    make conformance                               all systems, the table
    make conformance ARGS='--only kvtier'          one of them
    make conformance ARGS='--page docs/conformance.md --json -'

A system that cannot be installed is named as such, which is no pass. Exit status 1 when kvtier does
not pass everything; what others do changes nothing about it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

from behaviours import BEHAVIOURS, DRAM_PAGES, Start, Verdict, judge  # noqa: E402
from environment import PeerError, ensure  # noqa: E402
from kvtier_agent.bench import machine  # noqa: E402
from system import System  # noqa: E402

LMCACHE, VLLM = "0.5.6", "0.32.0"
SHM = Path("/dev/shm")


def lmcache_python() -> Path:
    from lmcache import PACKAGES

    return ensure(f"lmcache-{LMCACHE}", PACKAGES, "lmcache") / "python"


def vllm_python() -> Path:
    lock = ROOT / "requirements" / "vllm.lock"
    return ensure(f"vllm-{VLLM}", ("--no-deps", "-r", str(lock)), "vllm") / "python"


@dataclass(frozen=True)
class Candidate:
    """`python` makes the environment where there is none, and may raise `PeerError`."""

    title: str
    adapter: str
    python: Callable[[], Path]


SYSTEMS = {
    "kvtier": Candidate("kvtier", "kvtier_adapter.py", lambda: Path(sys.executable)),
    "lmcache": Candidate(
        f"LMCache {LMCACHE}, storage manager of the MP server + fs_native", "lmcache_adapter.py",
        lmcache_python,
    ),
    "vllm": Candidate(f"vLLM {VLLM}, CPU tier + fs tier", "vllm_adapter.py", vllm_python),
}  # fmt: skip

WORDS = {True: "pass", False: "FAIL", None: "does not apply"}


def examine(name: str, chosen: list[str], folder: Path, memory: Path) -> dict[str, Verdict]:
    """Every behaviour of one system, each on folders of its own."""
    candidate = SYSTEMS[name]
    try:
        python = candidate.python()
    except PeerError as error:
        return {b: Verdict(False, f"not installed: {error}") for b in chosen}
    found = {}
    for number, behaviour in enumerate(chosen):
        place = folder / f"{name}-{number}"
        start: Start = partial(
            System, python, candidate.adapter, place / "files", memory / f"{name}-{number}",
            folder / f"{name}.log",
        )  # fmt: skip
        place.mkdir(parents=True)
        begin = time.monotonic()
        found[behaviour] = judge(behaviour, start)
        for one in (place, memory / place.name):
            shutil.rmtree(one, ignore_errors=True)
        verdict = found[behaviour]
        note(
            f"{name}: {behaviour}: {WORDS[verdict.passed]} ({time.monotonic() - begin:.0f} s)"
            f" - {verdict.seen}"
        )
    return found


def table(results: dict[str, dict[str, Verdict]]) -> list[str]:
    """Markdown: the verdicts, then what was seen."""
    names = list(results)
    lines = [
        "| behaviour | " + " | ".join(SYSTEMS[n].title for n in names) + " |",
        "|---|" + "---|" * len(names),
    ]
    seen = [b for b in BEHAVIOURS if any(b in found for found in results.values())]
    for behaviour in seen:
        verdicts = (results[n].get(behaviour) for n in names)
        cells = ("not run" if v is None else WORDS[v.passed] for v in verdicts)
        lines.append(f"| {behaviour} | " + " | ".join(cells) + " |")
    for behaviour in seen:
        what = BEHAVIOURS[behaviour].__doc__
        assert what is not None
        lines += ["", f"### {behaviour}", "", what.strip(), ""]
        for name in names:
            if behaviour in results[name]:
                lines.append(f"- {SYSTEMS[name].title}: {results[name][behaviour].seen}")
    return lines


def page(results: dict[str, dict[str, Verdict]], facts: dict[str, Any]) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return "\n".join(
        [
            "# Conformance",
            "",
            "<!-- Written by make conformance; do not edit. -->",
            "",
            f"Behaviours that a cache should have, as they were seen on {facts['date']} on one"
            f" machine with {facts['machine']['cores']} processors and other work on it. Pages are"
            f" of 1 MiB, DRAM of {DRAM_PAGES} MiB. Each system has its defaults but for sizes and"
            " LRU. Below the table each behaviour says what is asked, and what was seen of each"
            " system, no more.",
            "",
            f"Versions: {versions}.",
            "",
            *table(results),
            "",
            "Run it again with `make conformance`.",
            "",
        ]
    )


def examined(names: list[str], chosen: list[str], place: Path | None) -> dict[str, Any]:
    """Run these behaviours on these systems; the whole answer as JSON has it."""
    # However it is ended, the caches' files go and the systems with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvc-", dir=place) as folder,
        tempfile.TemporaryDirectory(prefix="kvc-", dir=SHM) as memory,
    ):
        for name in names:
            found = examine(name, chosen, Path(folder), Path(memory))
            results[name] = {b: asdict(verdict) for b, verdict in found.items()}
    return {
        "results": results,
        "date": time.strftime("%Y-%m-%d"),
        "versions": machine.versions() | {"lmcache": LMCACHE, "vllm": VLLM},
        "machine": machine.machine() | {"load_average": machine.load_average()},
    }


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: later ones count, and say when and with what."""
    results: dict[str, Any] = {}
    for answer in answers:
        for name, found in answer["results"].items():
            results[name] = {**results.get(name, {}), **found}
    return {**answers[-1], "results": {name: results[name] for name in SYSTEMS if name in results}}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[*SYSTEMS], action="append", help="these systems (all)")
    parser.add_argument("--behaviour", action="append", help="those whose name has this in it")
    parser.add_argument("--folder", type=Path, help="a file system for the caches' files (/tmp)")
    parser.add_argument("--json", metavar="PATH|-", help="write the result as one JSON object")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    parser.add_argument(
        "--of",
        type=Path,
        action="append",
        metavar="FILE",
        help="show what --json wrote, run nothing",
    )
    given = parser.parse_args()
    chosen = [b for b in BEHAVIOURS if not given.behaviour or any(w in b for w in given.behaviour)]
    if not chosen:
        parser.error(f"no behaviour has that in its name; there are: {', '.join(BEHAVIOURS)}")
    if given.of:
        answer = joined([json.loads(path.read_text()) for path in given.of])
    else:
        answer = examined(given.only or list(SYSTEMS), chosen, given.folder)
    results = {
        name: {b: Verdict(**verdict) for b, verdict in found.items()}
        for name, found in answer["results"].items()
    }
    text = "\n".join(table(results))
    print(text, file=sys.stderr if given.json == "-" else sys.stdout)
    if given.json == "-":
        print(json.dumps(answer, indent=2))
    elif given.json:
        Path(given.json).write_text(json.dumps(answer, indent=2) + "\n")
    if given.page:
        given.page.write_text(page(results, answer))
    mine = results.get("kvtier", {})
    return 0 if all(verdict.passed for verdict in mine.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
