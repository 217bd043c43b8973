"""Which pages the vLLM connector loads and saves, step by step; no vLLM needed."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_agent.connectors.vllm.plan import RequestPlanner, SaveGuard

ROOT = b"r" * 16


def chain(parent: bytes, digest: bytes) -> bytes:
    return hashlib.blake2b(parent + digest, digest_size=16).digest()


def block_hash(index: int) -> bytes:
    return hashlib.sha256(f"block {index}".encode()).digest()


def planner(*, hashes: int, blocks: int, page_blocks: int = 2) -> RequestPlanner:
    """A planner with blocks of 4 tokens and one request `r` whose blocks are 100, 101, ..."""
    made = RequestPlanner(ROOT, 4, 4 * page_blocks, chain)
    made.track("r", [block_hash(i) for i in range(hashes)])
    made.blocks_replaced("r", range(100, 100 + blocks))
    return made


def test_pages_must_be_made_of_whole_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        RequestPlanner(ROOT, 16, 24, chain)


def test_a_page_key_depends_on_every_page_before_it() -> None:
    keys = planner(hashes=6, blocks=6).keys("r", 24)
    assert len(keys) == 3
    assert keys[0] == chain(ROOT, block_hash(1))
    assert keys[1] == chain(keys[0], block_hash(3))


def test_the_whole_prompt_is_never_loaded() -> None:
    made = planner(hashes=4, blocks=4)
    assert len(made.loadable_keys("r", 16)) == 1, "token 16 must be computed by vLLM itself"
    assert len(made.loadable_keys("r", 17)) == 2


def test_only_blocks_past_the_local_hit_are_written() -> None:
    made = planner(hashes=6, blocks=7)
    made.loadable_keys("r", 28)
    made.allocated("r", made.offer("r", hit_pages=3, computed_tokens=12))
    load, save = made.step("r", 28)
    assert load is not None
    assert (load.first_page, load.skip_blocks) == (1, 1)
    assert load.block_ids == (102, 103, 104, 105)
    assert len(load.keys) == 2
    assert save is None, "what came from the cache does not go back"
    assert made.step("r", 28) == (None, None), "nor with the next step"


def test_vllm_may_ask_again_before_it_allocates() -> None:
    made = planner(hashes=6, blocks=7)
    made.loadable_keys("r", 28)
    made.offer("r", hit_pages=3, computed_tokens=0)
    assert made.offer("r", hit_pages=3, computed_tokens=16) == 8
    made.allocated("r", 8)
    load, _ = made.step("r", 28)
    assert load is not None
    assert (load.first_page, load.skip_blocks, len(load.keys)) == (2, 0, 1)


def test_pages_are_saved_once_and_only_when_complete() -> None:
    made = planner(hashes=2, blocks=2)
    assert made.step("r", 7) == (None, None)
    _, save = made.step("r", 8)
    assert save is not None
    assert (save.first_page, save.block_ids, save.parent) == (0, (100, 101), ROOT)
    assert made.step("r", 9) == (None, None)


def test_a_failed_load_offers_the_pages_of_every_request_again() -> None:
    made = planner(hashes=4, blocks=4)
    made.track("other", [block_hash(i) for i in range(50, 54)])
    made.blocks_replaced("other", range(200, 204))
    for request in ("r", "other"):
        assert made.step(request, 16)[1] is not None
        assert made.step(request, 16)[1] is None
    made.load_failed()  # the worker saved nothing of that step
    for request in ("r", "other"):
        _, save = made.step(request, 16)
        assert save is not None
        assert (save.first_page, len(save.keys)) == (0, 2)


def test_pages_of_an_adapter_hang_from_its_content() -> None:
    made = RequestPlanner(ROOT, 4, 8, chain)
    hashes = [block_hash(i) for i in range(4)]
    for name, adapter in (("none", b""), ("one", b"1" * 16), ("two", b"2" * 16)):
        made.track(name, hashes, adapter)
        made.blocks_replaced(name, range(4))
    keys = [made.keys(name, 16) for name in ("none", "one", "two")]
    assert len({key for chain_of in keys for key in chain_of}) == 6
    assert keys[1][0] == chain(chain(ROOT, b"1" * 16), block_hash(1))
    _, save = made.step("one", 16)
    assert save is not None
    assert save.parent == chain(ROOT, b"1" * 16)


def test_an_adapter_of_unknown_content_is_neither_loaded_nor_saved() -> None:
    made = RequestPlanner(ROOT, 4, 8, chain)
    made.track("r", [block_hash(i) for i in range(4)], None)
    assert made.loadable_keys("r", 17) == []
    made.blocks_replaced("r", range(4))
    assert made.step("r", 16) == (None, None)


def test_after_a_reset_pages_have_other_names() -> None:
    made = planner(hashes=4, blocks=0)
    before = list(made.keys("r", 16))
    made.reset(b"n" * 16)
    assert not set(made.keys("r", 16)) & set(before)
    assert made.keys("r", 16)[0] == chain(b"n" * 16, block_hash(1))


def test_what_was_computed_before_a_reset_is_not_saved_after_it() -> None:
    made = planner(hashes=8, blocks=2)
    made.reset(b"n" * 16)
    made.blocks_appended("r", range(102, 108))
    assert made.step("r", 16) == (None, None)
    assert made.loadable_keys("r", 17) == []
    made.blocks_replaced("r", range(108))  # preempted, and computed anew
    _, save = made.step("r", 16)
    assert save is not None
    assert (save.first_page, save.parent) == (0, b"n" * 16)


def test_a_load_is_planned_once() -> None:
    made = planner(hashes=4, blocks=5)
    made.loadable_keys("r", 20)
    made.allocated("r", made.offer("r", 2, 0))
    assert made.step("r", 20)[0] is not None
    assert made.step("r", 21)[0] is None


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    page_blocks=st.integers(1, 4),
)
def test_every_complete_page_is_saved_exactly_once(steps: list[int], page_blocks: int) -> None:
    total = sum(steps)
    made = RequestPlanner(ROOT, 4, 4 * page_blocks, chain)
    hashes: list[bytes] = []
    made.track("r", hashes)
    made.blocks_replaced("r", [])
    saved: list[bytes] = []
    tokens = 0
    for step in steps:
        tokens += step
        while (len(hashes) + 1) * 4 <= tokens:
            made.blocks_appended("r", [len(hashes)])
            hashes.append(block_hash(len(hashes)))
        _, save = made.step("r", tokens)
        if save is not None:
            assert save.first_page == len(saved)
            assert len(save.block_ids) == page_blocks * len(save.keys)
            saved.extend(save.keys)
    assert saved == made.keys("r", total)
    assert len(saved) == total // (4 * page_blocks)


def test_an_offer_that_vllm_does_not_take_is_not_loaded() -> None:
    made = planner(hashes=4, blocks=5)
    made.loadable_keys("r", 20)
    made.allocated("r", made.offer("r", 2, 0))
    made.offer("r", 0, 8)
    made.allocated("r", 0)
    assert made.step("r", 20)[0] is None


def test_no_page_is_saved_whose_blocks_are_not_there_yet() -> None:
    made = planner(hashes=4, blocks=3)
    _, save = made.step("r", 16)
    assert save is not None
    assert save.block_ids == (100, 101)
    made.blocks_appended("r", [103])
    _, save = made.step("r", 17)
    assert save is not None
    assert save.block_ids == (102, 103)


def test_nothing_is_saved_until_a_failed_load_is_known_to_the_scheduler() -> None:
    guard = SaveGuard()
    assert guard.may_save(6, heard=0)
    guard.failed(7)
    guard.failed(7)
    assert not guard.may_save(7, heard=0)
    assert not guard.may_save(8, heard=0), "scheduled ahead: it rests on the same blocks"
    assert guard.may_save(8, heard=1)
    assert guard.may_save(9, heard=0), "a lost message does not end saving"
    guard.failed(9)
    assert not guard.may_save(10, heard=1)
    assert guard.may_save(10, heard=2)
