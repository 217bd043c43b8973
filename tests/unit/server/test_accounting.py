"""Hits and misses: every page asked for is counted once, whatever engines do."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kvtier_agent.cache.results import MISS
from kvtier_agent.server.accounting import QUESTION_SECONDS, Accounts

PAGE_TOKENS = 16


def tiers(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def balanced(accounts: Accounts) -> bool:
    tally = accounts.tally
    return sum(tally.pages) == tally.asked_pages and sum(tally.tokens) == tally.asked_tokens


@pytest.fixture
def accounts() -> Accounts:
    return Accounts(lease_seconds=30)


def ask(
    accounts: Accounts, pages: int, advised: int, owner: int = 1, number: int = 0, **more
) -> None:
    accounts.asked(0.0, owner, number, pages, PAGE_TOKENS, advised=advised, **more)


def test_nothing_worth_loading_is_all_misses_at_once(accounts: Accounts) -> None:
    ask(accounts, 5, 0)
    assert accounts.tally.pages == [0, 0, 0, 5]
    assert accounts.tally.tokens == [0, 0, 0, 80]


def test_pages_loaded_are_hits_where_they_were_and_the_rest_misses(accounts: Accounts) -> None:
    ask(accounts, 5, 3)
    assert accounts.tally.asked_pages == 0
    accounts.loaded(0.0, 1, 0, 7, tiers(0, 1, 2), PAGE_TOKENS)
    accounts.released(7)
    assert accounts.tally.pages == [1, 1, 1, 2]
    assert accounts.tally.tokens == [16, 16, 16, 32]


def test_behind_a_gap_there_are_no_hits(accounts: Accounts) -> None:
    ask(accounts, 4, 4)
    accounts.loaded(0.0, 1, 0, 7, tiers(1, MISS, 1, 1), PAGE_TOKENS)
    accounts.released(7)
    assert accounts.tally.pages == [0, 1, 0, 3]


def test_a_lease_that_nobody_used_is_all_misses(accounts: Accounts) -> None:
    ask(accounts, 3, 3)
    accounts.loaded(0.0, 1, 0, 7, tiers(1, 1, 2), PAGE_TOKENS)
    accounts.released(7, used=False)
    assert accounts.tally.pages == [0, 0, 0, 3]
    assert balanced(accounts)


def test_a_page_with_wrong_bytes_is_a_gap(accounts: Accounts) -> None:
    ask(accounts, 3, 3)
    accounts.loaded(0.0, 1, 0, 7, tiers(1, 1, 1), PAGE_TOKENS)
    accounts.released(7, np.array([1], np.uint32))
    assert accounts.tally.pages == [0, 1, 0, 2]


def test_the_last_page_counts_the_tokens_it_has(accounts: Accounts) -> None:
    ask(accounts, 3, 3, total_tokens=2 * PAGE_TOKENS + 5)
    accounts.loaded(0.0, 1, 0, 7, tiers(0, 0, 1), PAGE_TOKENS)
    accounts.released(7)
    assert accounts.tally.tokens == [32, 5, 0, 0]
    ask(accounts, 3, 0, total_tokens=100 + 2 * PAGE_TOKENS + 5, depth=100)
    assert accounts.tally.tokens[3] == 37


def test_a_question_loaded_in_groups_is_settled_once(accounts: Accounts) -> None:
    ask(accounts, 6, 4, number=99)
    accounts.loaded(0.0, 1, 99, 7, tiers(0, 0), PAGE_TOKENS)
    accounts.released(7)
    assert accounts.tally.questions == 0
    accounts.loaded(0.0, 1, 99, 8, tiers(1, 1), PAGE_TOKENS)
    accounts.released(8)
    assert accounts.tally.questions == 1
    assert accounts.tally.pages == [2, 2, 0, 2]


def test_after_a_gap_in_one_group_the_next_groups_are_no_hits(accounts: Accounts) -> None:
    ask(accounts, 4, 4)
    accounts.loaded(0.0, 1, 0, 7, tiers(0, MISS), PAGE_TOKENS)
    accounts.loaded(0.0, 1, 0, 8, tiers(0, 0), PAGE_TOKENS)
    accounts.released(7)
    accounts.released(8)
    assert accounts.tally.pages == [1, 0, 0, 3]
    assert balanced(accounts)


def test_a_scheduler_that_asks_in_every_step_asks_once(accounts: Accounts) -> None:
    for _ in range(5):
        ask(accounts, 4, 0, number=3)
    for _ in range(5):
        ask(accounts, 4, 2, number=4)
    accounts.loaded(0.0, 2, 4, 7, tiers(1, 1), PAGE_TOKENS)  # by the worker, another client
    accounts.released(7)
    assert accounts.tally.pages == [0, 2, 0, 6]
    assert accounts.tally.asked_pages == 8


def test_a_question_nobody_loads_for_is_misses_when_the_next_is_asked(accounts: Accounts) -> None:
    ask(accounts, 4, 4)
    ask(accounts, 2, 0)
    assert accounts.tally.pages == [0, 0, 0, 6]


def test_a_question_nobody_comes_back_to_is_misses_after_a_while(accounts: Accounts) -> None:
    ask(accounts, 4, 4)
    ask(accounts, 4, 4, number=5)
    accounts.expire(QUESTION_SECONDS - 1)
    assert accounts.tally.asked_pages == 0
    accounts.expire(QUESTION_SECONDS + 1)
    assert accounts.tally.pages == [0, 0, 0, 8]
    assert accounts.open_questions == 0


def test_a_lease_nobody_released_counts_when_it_expires(accounts: Accounts) -> None:
    ask(accounts, 2, 2)
    accounts.loaded(0.0, 1, 0, 7, tiers(1, 1), PAGE_TOKENS)
    accounts.expire(31)
    assert accounts.tally.pages == [0, 2, 0, 0]
    accounts.released(7)
    assert accounts.tally.asked_pages == 2


def test_a_client_that_is_gone_leaves_nothing_open(accounts: Accounts) -> None:
    ask(accounts, 2, 2)
    accounts.loaded(0.0, 1, 0, 7, tiers(1, 1), PAGE_TOKENS)
    ask(accounts, 3, 3, number=8)
    accounts.gone(1)
    assert accounts.open_questions == 0
    assert accounts.tally.asked_pages == 5
    assert balanced(accounts)


def test_a_load_without_a_question_is_one_of_its_own(accounts: Accounts) -> None:
    accounts.loaded(0.0, 1, 0, 7, tiers(0, MISS), PAGE_TOKENS)
    accounts.released(7)
    assert accounts.tally.pages == [1, 0, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_hits_and_misses_are_what_was_asked_whatever_clients_do(seed: int) -> None:
    rng = random.Random(seed)
    accounts = Accounts(lease_seconds=5)
    open_leases: list[int] = []
    now, lease = 0.0, 0
    for _ in range(2000):
        now += rng.random()
        owner, number = rng.randint(1, 4), rng.choice([0, 0, 1, 2, 3])
        match rng.randrange(5):
            case 0:
                pages = rng.randint(1, 6)
                accounts.asked(
                    now, owner, number, pages, PAGE_TOKENS, depth=rng.choice([0, 32]),
                    total_tokens=rng.choice([None, rng.randint(0, 200)]),
                    advised=rng.randint(0, pages),
                )  # fmt: skip
            case 1 | 2:
                lease += 1
                found = np.array(rng.choices([0, 1, 2, MISS], k=rng.randint(1, 6)), np.uint8)
                accounts.loaded(now, owner, number, lease, found, PAGE_TOKENS)
                open_leases.append(lease)
            case 3 if open_leases:
                bad = np.array([rng.randrange(6)] if rng.random() < 0.3 else [], np.uint32)
                accounts.released(open_leases.pop(rng.randrange(len(open_leases))), bad)
            case 4:
                accounts.expire(now)
                if rng.random() < 0.1:
                    accounts.gone(owner)
        assert balanced(accounts)
        assert min(accounts.tally.pages + accounts.tally.tokens) >= 0
    for owner in range(1, 5):
        accounts.gone(owner)
    assert accounts.open_questions == 0
    assert balanced(accounts)
    assert accounts.tally.asked_pages > 1000
