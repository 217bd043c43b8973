"""Keep what a release promised: ``python -m freeze vX.Y.Z`` (from the repository's root).

Writes ``tests/contract/releases/<version>/``: the CRDs of the release, policies that were valid in
it, and their revision hashes. A test holds every later version to them: the policies stay valid,
keep their hash, and no released field changes its type or default. A folder is written once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

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
    version = parser.parse_args().version
    if not re.fullmatch(r"v\d+\.\d+\.\d+", version):
        parser.error(f"{version} is no version: write it as v0.2.0")
    target = RELEASES / version
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
