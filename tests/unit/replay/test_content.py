"""Page content follows from the key, and no swap, shift, tear or stale page goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from kvtier_agent.replay.content import Content

PAGE = 4096


@pytest.fixture
def pages() -> tuple[Content, np.ndarray, np.ndarray]:
    keys = np.random.default_rng(5).integers(0, 256, (100, 16), dtype=np.uint8)
    content = Content(PAGE, seed=1)
    out = np.empty((100, PAGE), dtype=np.uint8)
    content.fill(keys, out)
    return content, keys, out


def test_right_pages_have_no_wrong_byte(pages) -> None:
    content, keys, out = pages
    assert content.wrong(keys, out).tolist() == [0] * 100
    assert Content(PAGE, seed=1).wrong(keys, out).sum() == 0


def test_all_pages_differ_in_every_word(pages) -> None:
    _, _, out = pages
    words = out.view(np.uint64)
    assert len({row.tobytes() for row in out}) == 100
    assert all(len(np.unique(words[:, column])) == 100 for column in range(0, words.shape[1], 37))


def test_one_flipped_bit_is_one_wrong_byte_of_that_page(pages) -> None:
    content, keys, out = pages
    out[63, 4095] ^= 1
    wrong = content.wrong(keys, out)
    assert wrong[63] == 1
    assert wrong.sum() == 1


@pytest.mark.parametrize("shift", [1, 8, 64, PAGE // 2])
def test_swapped_shifted_torn_and_stale_pages_are_wrong(pages, shift: int) -> None:
    content, keys, out = pages
    swapped = out.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert np.flatnonzero(content.wrong(keys, swapped)).tolist() == [3, 4]
    moved = out.copy()
    moved[7] = np.roll(moved[7], shift)
    assert np.flatnonzero(content.wrong(keys, moved)).tolist() == [7]
    torn = out.copy()
    torn[9, shift:] = torn[10, shift:]
    assert np.flatnonzero(content.wrong(keys, torn)).tolist() == [9]
    stale = out.copy()
    Content(PAGE, seed=2).fill(keys[5:6], stale[5:6])
    assert np.flatnonzero(content.wrong(keys, stale)).tolist() == [5]
    assert content.wrong(keys, np.zeros_like(out)).min() > PAGE // 2


def test_keys_that_share_a_half_still_make_different_pages() -> None:
    content = Content(PAGE, seed=1)
    keys = np.zeros((3, 16), dtype=np.uint8)
    keys[1, 0] = 1
    keys[2, 15] = 1
    out = np.empty((3, PAGE), dtype=np.uint8)
    content.fill(keys, out)
    assert len({row.tobytes() for row in out}) == 3


def test_page_sizes_are_whole_words() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Content(1000, seed=1)
