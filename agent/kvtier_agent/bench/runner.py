"""One benchmark from start to end, and the circumstances it ran under."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtier_agent.bench import endtoend, l2, lookup, machine, memory, recovery, settings
from kvtier_agent.bench.errors import BenchError
from kvtier_agent.bench.figures import Figure, Report
from kvtier_agent.bench.stand import Sizes, Stand
from kvtier_agent.cache.geometry import Geometry, GeometryError
from kvtier_agent.server.client import AgentError

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Benchmark:
    """`sizes` and `geometry` say what agent it needs, `measure` does the rest."""

    sizes: Callable[[Any], Sizes]
    geometry: Callable[[Any], Geometry]
    measure: Callable[[Stand, Any, Say], list[Figure]]


_BENCHMARKS: Final[dict[type[settings.BenchSettings], _Benchmark]] = {
    settings.MemorySettings: _Benchmark(memory.sizes, memory.geometry, memory.run),
    settings.LookupSettings: _Benchmark(lookup.sizes, lambda _: lookup.GEOMETRY, lookup.run),
    settings.L2Settings: _Benchmark(l2.sizes, l2.geometry, l2.run),
    settings.RecoverySettings: _Benchmark(
        recovery.sizes, lambda _: recovery.GEOMETRY, recovery.run
    ),
    settings.EndToEndSettings: _Benchmark(endtoend.sizes, endtoend.geometry, endtoend.run),
}


def run(command: Sequence[str], chosen: settings.BenchSettings, say: Say) -> Report:
    """The benchmark that `chosen` are the settings of.

    Args:
        command: the words that start `kvtier agent`.
        say: told what is being done, a line at a time.

    Raises:
        BenchError: one line; whatever was started is gone by then, also on KeyboardInterrupt.
    """
    benchmark = _BENCHMARKS[type(chosen)]
    volume: Path | None = getattr(chosen, "volume", None)
    circumstances = machine.machine() | {"load_average_before": machine.load_average()}
    try:
        sizes = benchmark.sizes(chosen)
        if sizes.nvme:
            l2.check_volume(volume or Path(tempfile.gettempdir()))
        say(f"starting an agent for process {os.getpid()}")
        with Stand(command, sizes, benchmark.geometry(chosen), volume=volume) as stand:
            figures = benchmark.measure(stand, chosen, say)
    except GeometryError as error:
        raise BenchError(str(error)) from None
    except AgentError as error:
        raise BenchError(f"the agent did not do its part: {error}") from None
    return Report(
        figures=tuple(figures),
        settings=chosen.model_dump(mode="json"),
        versions=machine.versions(),
        machine=circumstances | {"load_average_after": machine.load_average()},
    )
