"""Keep what a release promised: ``python -m freeze vX.Y.Z`` (from the repository's root).

Writes ``tests/contract/releases/<version>/``: the CRDs of the release, policies that were valid in
it, their revision hashes, and below ``state/`` what an agent left behind and how a client spoke
(``left_by_release``). Tests hold every later version to them: the policies stay valid, keep their
hash, no released field changes its type or default, an agent that is updated finds its pages or
starts cold, and a client of the release is served. A folder is written once.

``--state`` adds ``state/`` to the folder of a release that was kept without it; run it while the
formats are still those of the release.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import left_by_release
from kvtier_api import KVTierPolicy, manifest, revision_hash

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / "tests" / "contract" / "releases"


def hashes(folder: Path) -> dict[str, str]:
    """File name -> revision hash of the one policy in it."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        (document,) = manifest.read(path)
        found[path.name] = revision_hash(KVTierPolicy.read(document.obj).spec)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m freeze", description=__doc__)
    parser.add_argument("version", help="tag of the release, such as v0.2.0")
    parser.add_argument("--state", action="store_true", help="add what an agent leaves behind")
    options = parser.parse_args()
    version = options.version
    if not re.fullmatch(r"v\d+\.\d+\.\d+", version):
        parser.error(f"{version} is no version: write it as v0.2.0")
    target = RELEASES / version
    if options.state:
        if not target.exists() or (target / "state").exists():
            parser.error(f"{target} is not there, or has a state already: it does not change")
        _keep_state(target)
        return 0
    if target.exists():
        parser.error(f"{target} is there already, and a release does not change")
    (target / "crds").mkdir(parents=True)
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        shutil.copy(path, target / "crds")
    (target / "policies").mkdir()
    for path in sorted((ROOT / "examples" / "policies").glob("*.yaml")):
        shutil.copy(path, target / "policies")
    text = json.dumps(hashes(target / "policies"), indent=2) + "\n"
    (target / "hashes.json").write_text(text)
    _keep_state(target)
    return 0


def _keep_state(target: Path) -> None:
    (target / "state").mkdir()
    left_by_release.keep(target / "state")


if __name__ == "__main__":
    raise SystemExit(main())
