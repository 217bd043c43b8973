"""The contract of ``kvtier policy validate``: what goes where, and the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtier_api.validate import MAX_BYTES
from kvtier_cli.main import COMMANDS, app
from typer.testing import CliRunner

GOOD = """\
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: good}
spec: {valueDensity: {model: classic}}
"""
BAD = GOOD.replace("good", "bad").replace("spec: {", "spec: {priority: -1, ")


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["policy", "validate", *arguments], input=stdin)
    return done.exit_code, done.stdout, done.stderr


def test_valid_is_exit_0(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assert run(str(file)) == (0, "1 object valid\n", "")


def test_json_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    code, out, err = run(str(file), "--json", "-")
    assert code == 1
    assert json.loads(out) == {
        "valid": False,
        "problems": [{"file": str(file), "path": "spec.priority", "message": "must be at least 0"}],
    }
    assert err == f"{file}:4: spec.priority: must be at least 0\n"


def test_json_to_a_file_leaves_the_text(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run("-", "--json", str(out), stdin=GOOD) == (0, "1 object valid\n", "")
    assert json.loads(out.read_text()) == {"valid": True, "problems": []}


def test_json_to_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    code, _, err = run("-", "--json", str(tmp_path / "no" / "out.json"), stdin=GOOD)
    assert code == 1
    assert "cannot write: No such file or directory" in err
    assert len(err.splitlines()) == 1


def test_many_documents_each_with_its_line() -> None:
    code, out, err = run("-", stdin=f"{GOOD}---\n---\n{BAD}---\nkind: Secret\napiVersion: v1\n")
    assert code == 1
    assert out == "-:10: spec.priority: must be at least 0\n"
    assert "Secret is not kvtier's; passed over" in err


def test_a_list_is_looked_into() -> None:
    items = {"kind": "List", "apiVersion": "v1", "items": [json.loads(json.dumps({}))]}
    code, out, _ = run("-", stdin=json.dumps(items))
    assert code == 1
    assert "items[0].kind: write kind: KVTierPolicy" in out


def test_one_name_twice_is_a_problem(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(GOOD)
    code, out, _ = run(str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert code == 1
    assert f"good is already defined in {tmp_path / 'a.yaml'}" in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no KVTierPolicy"),
        ("apiVersion: v1\nkind: Secret\n", "holds no KVTierPolicy"),
        ("a: [1\nb: 2\n", "-:2: is not YAML"),
        ("a: 1\na: 2\n", "-:2: the key a stands twice"),
        ("just text", "not a Kubernetes object"),
        ("apiVersion: kvtier.io/v2\nkind: KVTierPolicy\n", "write apiVersion: kvtier.io/v1alpha1"),
        ("apiVersion: kvtier.io/v1alpha1\nkind: KVTierPolcy\n", "write kind: KVTierPolicy"),
    ],
)
def test_what_is_no_policy_is_one_line_and_exit_1(text: str, says: str) -> None:
    code, out, _ = run("-", stdin=text)
    assert code == 1
    assert says in out
    assert len(out.splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    code, out, _ = run(str(file))
    assert (code, out) == (1, f"{file}: cannot be read: No such file or directory\n")


@pytest.mark.parametrize("arguments", [[], ["--no-such-option"], ["-", "--json"]])
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


# ------------------------------------------------------------ lists, sizes, encodings


def test_items_of_a_policy_list_may_leave_out_their_kind() -> None:
    bad = {"metadata": {"name": "a"}, "spec": {"valueDensity": {"model": "classik"}}}
    good = {"metadata": {"name": "b"}, "spec": {"valueDensity": {"model": "classic"}}}
    group = {"apiVersion": "kvtier.io/v1alpha1", "kind": "KVTierPolicyList"}
    inner = {**group, "items": [good, bad]}
    outer = {"apiVersion": "v1", "kind": "List", "items": [inner]}
    assert run("-", stdin=json.dumps({**group, "items": [good]}))[:2] == (0, "1 object valid\n")
    code, out, _ = run("-", stdin=json.dumps(outer))
    assert code == 1
    assert "items[0].items[1].spec.valueDensity.model: write" in out
    assert len(out.splitlines()) == 1


def test_many_policies_may_be_larger_than_one_may() -> None:
    note = "x" * (200 << 10)
    documents = [
        GOOD.replace("{name: good}", f"{{name: p{i}, annotations: {{a: {note}}}}}")
        for i in range(9)
    ]
    text = "---\n".join(documents)
    assert len(text) > MAX_BYTES
    assert run("-", stdin=text) == (0, "9 objects valid\n", "")


def test_one_object_larger_than_a_server_takes_is_a_problem() -> None:
    code, out, _ = run("-", stdin=GOOD.replace("{name: good}", f"{{name: {'x' * MAX_BYTES}}}"))
    assert code == 1
    assert f"bytes: an API server takes {MAX_BYTES} an object" in out


def test_a_fifo_is_answered_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    code, out, _ = run(str(tmp_path / "fifo"))
    assert (code, out) == (
        1,
        f"{tmp_path / 'fifo'}: is no regular file: write '-' to read standard input\n",
    )


def test_what_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(GOOD.replace("spec: {", "spec: {größe: 1, "), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_cli.main", "policy", "validate", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 1
    assert "spec.gr\\xf6\\xdfe: unknown field" in done.stdout
    assert done.stderr == ""


# ------------------------------------------------------------ the frame


def kvtier(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{code}\nfrom kvtier_cli.main import app\napp()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    watch = (
        "import sys, atexit\n"
        "heavy = ('torch', 'numpy', 'kopf', 'kubernetes', 'zmq', 'kvtier_agent')\n"
        "atexit.register(lambda: print('LOADED', [m for m in heavy if m in sys.modules]))"
    )
    done = kvtier("--help", code=watch)
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.rstrip().endswith("LOADED []")


def test_version() -> None:
    done = kvtier("--version")
    assert done.stdout.startswith("kvtier ")


def test_a_misspelt_command_is_usage() -> None:
    done = kvtier("polcy")
    assert done.returncode == 2
    assert "policy" in done.stderr


@pytest.mark.parametrize(
    ("command", "blocked"),
    [("operator", "structlog"), ("replay", "numpy"), ("inspect", "msgspec")],
)
def test_a_missing_package_is_answered_by_its_extra(command: str, blocked: str) -> None:
    without = (
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == '{blocked}':\n"
        "            raise ModuleNotFoundError(f'no {name}', name=name)\n"
        "sys.meta_path.insert(0, Gone())"
    )
    done = kvtier(command, *(["trace.jsonl"] if command == "replay" else []), code=without)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: kvtier {command} needs the package {blocked}, which is not installed: "
        f"pip install 'CHECKOUT[{COMMANDS[command].extra}]' "
        "(CHECKOUT: the folder of kvtier's source)\n"
    )
