"""The agents and clients of ``tests/unit/server``, for killing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PLACE = Path(__file__).parents[2] / "unit" / "server" / "conftest.py"
_spec = importlib.util.spec_from_file_location("kvtier_tests_server_fixtures", _PLACE)
assert _spec is not None
assert _spec.loader is not None
_fixtures = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _fixtures
_spec.loader.exec_module(_fixtures)

folder = _fixtures.folder
start_agent = _fixtures.start_agent
connect = _fixtures.connect
pages_of = _fixtures.pages_of
until = _fixtures.until
