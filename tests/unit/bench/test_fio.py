"""The baseline of `l2`: asked as it should be, and understood."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from kvtier_agent.bench import fio
from kvtier_agent.bench.errors import BenchError

MIB = 1 << 20


def said(**changes: object) -> str:
    job = {
        "error": 0, "job_runtime": 2000, "usr_cpu": 1.5, "sys_cpu": 3.5,
        "read": {"bw_bytes": 1.5e9, "io_bytes": 3_000_000_000},
        "write": {"bw_bytes": 0, "io_bytes": 0},
    }  # fmt: skip
    return "a note of fio's\n" + json.dumps({"jobs": [job | changes]})


def test_speed_and_processor_time_are_read_from_its_answer() -> None:
    answer = fio.read_answer(said(), "read")
    assert answer.gb_per_second == 1.5
    # 5 % of 2 s for 3 GB.
    assert answer.cpu_seconds_per_gb == pytest.approx(0.1 / 3)


@pytest.mark.parametrize("text", ["", "fio: no such engine", "{}", '{"jobs": []}', '{"jobs": [{}]'])
def test_what_is_no_answer_is_told_in_its_own_words(text: str) -> None:
    with pytest.raises(BenchError, match="fio failed") as caught:
        fio.read_answer(text, "read")
    assert "\n" not in str(caught.value)


def test_an_error_is_never_taken_for_a_figure() -> None:
    with pytest.raises(BenchError, match="error 5"):
        fio.read_answer(said(error=5), "read")
    with pytest.raises(BenchError, match="fio failed"):
        fio.read_answer(said(), "write")  # nothing was moved


def test_the_baseline_is_o_direct_at_our_depth_and_unit() -> None:
    job = fio.Job(Path("/mnt/x"), 64 * MIB, MIB, 32)
    words = fio.arguments("fio", job, "read", fio.PLAIN)
    for word in ("--direct=1", "--ioengine=io_uring", "--iodepth=32", f"--bs={MIB}",
                 "--fixedbufs=1", "--registerfiles=1"):  # fmt: skip
        assert word in words


@pytest.mark.skipif(fio.find() is None, reason=fio.MISSING)
def test_a_real_fio_understands_the_words(tmp_path: Path) -> None:
    path = fio.find()
    assert path is not None
    job = fio.Job(tmp_path / "file", 4 * MIB, MIB, 4)
    for direction in ("write", "read"):
        words = fio.arguments(path, job, direction, fio.PLAIN, engine="psync")  # type: ignore[arg-type]
        words = ["--direct=0" if word == "--direct=1" else word for word in words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert fio.read_answer(done.stdout, direction).gb_per_second > 0  # type: ignore[arg-type]
