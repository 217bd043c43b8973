"""Page identity: the published vectors, and what must (not) change a key."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from kvtier_agent.cache import identity
from kvtier_agent.cache.geometry import Geometry, GeometryError

VECTORS = Path(__file__).parents[2] / "contract" / "vectors" / "page_identity.json"


def test_the_published_vectors_hold():
    vectors = json.loads(VECTORS.read_text())
    assert vectors["person"] == identity.PERSON.decode()
    for case in vectors["cases"]:
        geometry = Geometry(**case["geometry"])
        assert geometry.fingerprint.hex() == case["fingerprint"]
        root = identity.root_key(geometry.fingerprint, bytes.fromhex(case["tenant_salt"]))
        assert root.hex() == case["root"]
        extras = [bytes.fromhex(extra) for extra in case["extras"]]
        keys = identity.chain_keys(root, case["tokens"], geometry.page_tokens, extras)
        assert [bytes(key).hex() for key in keys] == case["keys"]
        named = identity.chain_keys_from_digests(root, [bytes.fromhex(d) for d in case["digests"]])
        assert [bytes(key).hex() for key in named] == case["digest_keys"]


def test_the_published_masks_of_ranks_hold():
    masks = json.loads(VECTORS.read_text())["rank_masks"]
    assert len(masks) == 4
    for case in masks:
        assert identity.rank_mask(case["rank"], case["tp"]).hex() == case["mask"]
    data = b"T" + (4).to_bytes(4, "little") + (8).to_bytes(4, "little")
    data += (4).to_bytes(4, "little") + (7).to_bytes(4, "little")
    by_hand = blake2b(data, digest_size=16, person=b"kvtier-page-1").hexdigest()
    assert masks[-1] == {"tp": 8, "rank": 7, "mask": by_hand}


def test_a_vector_computed_by_hand():
    """The framing as written down, without our own helper."""
    parent = bytes(range(16))
    data = b"P" + (16).to_bytes(4, "little") + parent
    data += (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + (70000).to_bytes(4, "little")
    data += (3).to_bytes(4, "little") + b"abc"
    expected = blake2b(data, digest_size=16, person=b"kvtier-page-1").digest()
    assert identity.child_key(parent, [1, 70000], [b"abc"]) == expected


def test_fields_cannot_run_into_each_other():
    parent = identity.root_key(bytes(16))
    keys = {
        identity.child_key(parent, [1, 2]),
        identity.child_key(parent, [1], [(2).to_bytes(4, "little")]),
        identity.child_key(parent, [1], [b"", (2).to_bytes(4, "little")]),
        identity.child_key(parent, [1], [b"ab", b"c"]),
        identity.child_key(parent, [1], [b"a", b"bc"]),
        identity.child_key(parent, [1], [b"abc"]),
        identity.child_key_from_digest(parent, bytes(32)),
        identity.child_key(parent, np.zeros(8, dtype=np.uint32)),
    }
    assert len(keys) == 8


@pytest.mark.parametrize("change", [
    {"weights": "v2"}, {"dtype": "fp8"}, {"layout": "other"}, {"layers": 3}, {"kv_heads": 4},
    {"head_size": 65}, {"page_tokens": 32}, {"tp": 2},
])  # fmt: skip
def test_everything_in_the_geometry_is_in_the_fingerprint(change):
    base = {"layers": 2, "kv_heads": 2, "head_size": 64, "dtype_bytes": 2, "page_tokens": 16,
            "weights": "v1", "dtype": "bf16", "layout": "nhd-avx512"}  # fmt: skip
    assert Geometry(**base).fingerprint != Geometry(**{**base, **change}).fingerprint


def test_the_tenant_salt_separates_chains():
    fingerprint = bytes(16)
    assert identity.root_key(fingerprint, b"a") != identity.root_key(fingerprint, b"b")


def test_a_chain_is_a_prefix_property():
    root = identity.root_key(bytes(16))
    one = identity.chain_keys(root, range(64), 16)
    other = identity.chain_keys(root, [*range(32), 999, *range(33, 64)], 16)
    assert (one[:2] == other[:2]).all()
    assert (one[2:] != other[2:]).any(axis=1).all()
    assert identity.chain_keys(root, range(70), 16).shape == (5, 16)


@pytest.mark.parametrize("bad", [b"", bytes(15), bytes(17)])
def test_a_parent_that_is_no_key_is_refused(bad):
    with pytest.raises(ValueError, match="parent key"):
        identity.child_key(bad, [1])


def test_a_digest_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="give 16 to 64"):
        identity.child_key_from_digest(bytes(16), b"short")


def test_bytes_per_token_of_llama_3_70b():
    whole = Geometry(layers=80, kv_heads=8, head_size=128, dtype_bytes=2, page_tokens=256)
    assert whole.bytes_per_token == 320 * 1024
    rank = Geometry(layers=80, kv_heads=8, head_size=128, dtype_bytes=2, page_tokens=256, tp=4)
    assert rank.bytes_per_token == 80 * 1024
    assert rank.page_bytes == 256 * 80 * 1024
    assert rank.units == 20
    assert rank.slot_bytes == rank.page_bytes + 4096, "a block with the sums of the units"


def test_slots_are_rounded_up_to_4096():
    assert Geometry.of_page_bytes(5000, 2).slot_bytes == 8192


@pytest.mark.parametrize(("kwargs", "says"), [
    ({"layers": 0, "kv_heads": 1, "head_size": 1, "dtype_bytes": 1, "page_tokens": 1}, "layers"),
    ({"layers": 1, "kv_heads": 1, "head_size": 1, "dtype_bytes": 1, "page_tokens": 1, "tp": 3},
     "divides"),
    ({"layers": 100, "kv_heads": 100, "head_size": 1000, "dtype_bytes": 4, "page_tokens": 1000},
     "smaller page_tokens"),
])  # fmt: skip
def test_a_geometry_that_makes_no_sense_says_what_to_write(kwargs, says):
    with pytest.raises(GeometryError, match=says):
        Geometry(**kwargs)


def test_page_bytes_that_do_not_fit_the_tokens_say_what_to_write():
    with pytest.raises(GeometryError, match="multiple of 1024"):
        Geometry.of_page_bytes(1000, 512)
