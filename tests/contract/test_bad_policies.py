"""Each file in ``bad_policies/`` has one fault, and validation answers with the sentence it names.

The header of a file says the fault, whether a rule or the schema refuses it, and the sentence. The
real API server is asked the same in ``tests/cluster/api``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtier_api import manifest, rules, validate
from kvtier_cli.main import app
from typer.testing import CliRunner

FOLDER = Path(__file__).parent / "bad_policies"
FILES = sorted(FOLDER.glob("*.yaml"))
RULES = {
    name: rule
    for name, rule in vars(rules).items()
    if isinstance(rule, rules.Rule | rules.ValueRule)
}


def header(path: Path) -> tuple[str, str]:
    """(rule or schema, sentence)."""
    fault, by, says = path.read_text().splitlines()[:3]
    assert fault.startswith("# Fault: ")
    return by.removeprefix("# Refused by: "), says.removeprefix("# Says: ")


def test_there_are_many() -> None:
    assert len(FILES) >= 45


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_one_fault_one_sentence(path: Path) -> None:
    by, sentence = header(path)
    assert by in ("rule", "schema")
    (document,) = manifest.read(path)
    (problem,) = validate(document.obj)
    assert problem.message == sentence
    assert by == "schema" or sentence in {rule.message for rule in RULES.values()}


def test_the_command_says_the_same_and_where(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["policy", "validate", *map(str, FILES), "--json", str(out)])
    assert done.exit_code == 1
    answer = json.loads(out.read_text())
    assert answer["valid"] is False
    said = {p["file"]: (p["path"], p["message"]) for p in answer["problems"]}
    assert set(said) == set(map(str, FILES))
    for path in FILES:
        assert said[str(path)][1] == header(path)[1]
        assert f"{path}:" in done.output


# Rules about KVTierNode and about a status are for the writes of programs, not for a user's file;
# one about more than 4,096 keys would need a file of 140 KB.
ELSEWHERE = {"STABLE_NEEDS_POLICY", "CONDITIONS_ROOM", "FROZEN_KEYS"}


@pytest.mark.parametrize("name", sorted(set(RULES) - ELSEWHERE))
def test_every_rule_has_a_policy_that_breaks_it(name: str) -> None:
    assert RULES[name].message in {header(path)[1] for path in FILES}


def test_names_of_rules_are_unique() -> None:
    names = [rule.name for rule in RULES.values()]
    assert len(set(names)) == len(names)
    assert len({rule.message for rule in RULES.values()}) == len(names)
