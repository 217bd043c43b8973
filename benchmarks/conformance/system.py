"""A system under test: its adapter as a process, and what can be done to its files meanwhile."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

ADAPTERS = Path(__file__).parent / "adapters"
sys.path.insert(0, str(ADAPTERS))

from common import PAGE_BYTES, content  # noqa: E402

SECTOR = 512
ORDER_SECONDS = 300.0


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


class AdapterError(Exception):
    """An adapter failed; its last words."""


def _flip(path: Path, offset: int, mask: int) -> None:
    """On the drive, and not in the page cache beside it."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class System:
    """One life of a system on `folder`, from `open` to `close` or `kill`; then the next may be
    started on the same folder. Use as a context manager."""

    def __init__(self, python: Path, adapter: str, folder: Path, memory: Path, log: Path) -> None:
        """`python`: of the system's environment; `adapter`: a file beside this one; `memory`: a
        folder on tmpfs."""
        self.folder = folder
        self.memory = memory
        self._log = log
        folder.mkdir(parents=True, exist_ok=True)
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                # With bytecode, without which some take a minute to be imported.
                [
                    *(str(python), "-X", f"pycache_prefix={python.parent.parent / 'pycache'}"),
                    str(ADAPTERS / adapter),
                ],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                env=_environment(),
            )  # fmt: skip

    def open(self, dram_pages: int, disk_pages: int) -> dict[str, Any]:
        """Its answer to the first order."""
        return self.ask(
            "open", folder=str(self.folder), memory=str(self.memory), dram_pages=dram_pages,
            disk_pages=disk_pages,
        )  # fmt: skip

    def ask(self, order: str, seconds: float = ORDER_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Its answer. Raises `AdapterError`."""
        self.send(order, **arguments)
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], seconds)
        line = stdout.readline() if ready else ""
        if not line:
            why = "gave no answer" if ready else f"gave no answer for {seconds:.0f} s"
            raise AdapterError(f"{order}: {why}; {self._words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AdapterError(f"{order}: {answer['error']}")
        return answer

    def send(self, order: str, **arguments: Any) -> None:
        """Without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": order, **arguments}) + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def disk_bytes(self) -> int:
        """Bytes of blocks of its files."""
        files = (p for p in self.folder.rglob("*") if p.is_file() and not p.is_symlink())
        return sum(p.stat().st_blocks * 512 for p in files)

    def flip_bits(self, numbers: list[int], chance: random.Random) -> list[int]:
        """Flip one bit in every copy of these pages on disk; the numbers of those that were found
        there. A page is found by its first bytes, at any sector, whatever the layout of files."""
        first = {int(content(n)[:8].view(np.uint64)[0]): n for n in numbers}
        flipped: set[int] = set()
        for path in sorted(p for p in self.folder.rglob("*") if p.is_file()):
            words = np.fromfile(path, np.uint64, path.stat().st_size // SECTOR * SECTOR // 8)
            starts = words[:: SECTOR // 8]
            for sector in np.flatnonzero(np.isin(starts, np.array([*first], np.uint64))):
                bit = chance.randrange(8 * PAGE_BYTES)
                _flip(path, int(sector) * SECTOR + bit // 8, 1 << bit % 8)
                flipped.add(first[int(starts[sector])])
        return sorted(flipped)

    def _words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
