"""The policy file of an agent that runs alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvtier_agent.node.desired import Problem, Wanted
from kvtier_agent.node.standalone import PolicyFile, PolicyFileError, read_policy
from kvtier_api import manifest

POLICY = """
apiVersion: kvtier.io/v1alpha1
kind: KVTierPolicy
metadata: {name: alone}
spec:
  tiers: {hbm: {size: 64Mi}, dram: {size: 128Mi}}
  valueDensity: {model: classic}
"""


def write(path: Path, text: str, tick: int = 0) -> Path:
    path.write_text(text)
    os.utime(path, ns=(tick, 1_000_000_000_000 + tick))
    return path


def test_a_policy_becomes_a_revision(tmp_path: Path) -> None:
    wanted = read_policy(write(tmp_path / "p.yaml", POLICY))
    assert wanted.policy == "alone"
    assert len(wanted.revision) == 64
    assert wanted.spec.tiers.dram.size is not None
    assert wanted.spec.tiers.dram.size.bytes == 128 << 20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("a: [", "line", id="not YAML"),
        pytest.param("\x00", "is not YAML", id="no text"),
        pytest.param("", "holds 0 documents", id="empty"),
        pytest.param(POLICY + "---" + POLICY, "holds 2 documents", id="two policies"),
        pytest.param(POLICY + "kind: KVTierPolicy\n", "stands twice", id="a key twice"),
        pytest.param("[1, 2]", "apiVersion, kind, metadata and spec", id="a list"),
        pytest.param(
            POLICY.replace("KVTierPolicy", "KVTierNode"), "write kind: KVTierPolicy", id="kind"
        ),
        pytest.param(POLICY.replace("tiers:", "tires:"), "did you mean tiers?", id="unknown field"),
        pytest.param(POLICY.replace("64Mi", "64MB"), "not a size", id="no quantity"),
        pytest.param(
            POLICY.replace("classic", "clever"), "spec.valueDensity.model", id="unknown model"
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_place(
    tmp_path: Path, text: str, says: str
) -> None:
    path = write(tmp_path / "p.yaml", text)
    with pytest.raises(PolicyFileError) as e:
        read_policy(path)
    message = str(e.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


def test_a_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="No such file or directory; give --policy a file"):
        read_policy(tmp_path / "none.yaml")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(PolicyFileError, match="larger than"):
        read_policy(write(tmp_path / "p.yaml", "#" * (manifest.MAX_FILE_BYTES + 1)))


def test_the_file_is_reread_when_it_changes_and_only_then(tmp_path: Path) -> None:
    said: list[tuple[Wanted | None, Problem | None]] = []
    path = write(tmp_path / "p.yaml", POLICY)
    file = PolicyFile(path, lambda w, p: said.append((w, p)))
    first = file.read_first()
    assert not file.look()

    write(path, POLICY.replace("128Mi", "256Mi"), tick=1)
    assert file.look()
    assert not file.look()
    changed, problem = said[-1]
    assert changed is not None
    assert problem is None
    assert changed.revision != first.revision

    write(path, "nonsense", tick=2)
    assert file.look()
    nothing, problem = said[-1]
    assert nothing is None
    assert problem is not None
    assert "p.yaml" in problem.message

    path.unlink()
    assert file.look()
    assert not file.look(), "a file that stays away is reported once"
    assert said[-1][0] is None

    write(path, POLICY, tick=3)
    assert file.look()
    back, problem = said[-1]
    assert problem is None
    assert back == first
    file.reread()
    assert file.look()
    assert len(said) == 5


def test_an_editor_that_replaces_the_file_is_seen(tmp_path: Path) -> None:
    said: list[Wanted | None] = []
    path = write(tmp_path / "p.yaml", POLICY)
    file = PolicyFile(path, lambda w, p: said.append(w))
    file.read_first()
    new = write(tmp_path / "new", POLICY.replace("128Mi", "127Mi"))  # same size, same time
    new.replace(path)
    assert file.look()
    assert said[0] is not None
