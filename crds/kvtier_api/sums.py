"""Sizes added up exactly, as CEL text and in Python.

CEL cannot add up a list of quantities, and floats of them are not exact. So each size is cut into
whole bytes near it and the rest in millionths of a byte (the grammar has six decimals, so that the
rest is a whole number of them), and both are added up as whole numbers. The last comparison may
use floats: it is exact near a tie, and elsewhere the difference is far larger than the error.

A size beyond ``most`` would not fit into an int. Then the sum is not judged, on either side: the
rule about that size speaks.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_api.quantity import Quantity, exact_size

__all__ = ["cel_sum_fits", "sum_fits"]


def cel_sum_fits(items: str, size: str, total: str, most: str) -> str:
    """CEL: the field ``size`` over all of ``self.items`` adds up to at most ``self.total``."""
    part, whole = f"i.{size}", f"self.{total}"
    beyond = f"compareTo(quantity('{most}')) > 0"

    def summed(text: str) -> str:
        return f"self.{items}.map(i, {text}).sum()"

    return (
        f"quantity(string({whole})).{beyond} || "
        f"self.{items}.exists(i, quantity(string({part})).{beyond}) || "
        f"double({summed(_millionths(part))} - ({_millionths(whole)})) <= "
        f"double({_bytes(whole)} - {summed(_bytes(part))}) * 1000000.0"
    )


def sum_fits(sizes: Iterable[Quantity], total: Quantity, most: str) -> bool:
    """The same in Python."""
    exact = [size.exact for size in sizes]
    if any(size > exact_size(most) for size in (total.exact, *exact)):
        return True
    return sum(exact) <= total.exact


def _bytes(size: str) -> str:
    return f"int(quantity(string({size})).asApproximateFloat())"


def _millionths(size: str) -> str:
    rest = f"quantity(string({size})).sub({_bytes(size)}).asApproximateFloat()"
    return f"int({rest} * 1000000.0 + 2000000.5) - 2000000"  # int() cuts towards zero
