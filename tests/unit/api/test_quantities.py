"""Sizes are Kubernetes quantities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_api.quantity import Quantity, format_size, parse_size
from pydantic import TypeAdapter, ValidationError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1.5Ki", 1536),
        ("0.1Ki", 103),  # 102.4, rounded up
        ("16Gi", 16 * 2**30),
        ("1.5Ti", 3 * 2**39),
        ("500G", 500 * 10**9),
        ("2Pi", 2**51),
        ("007M", 7_000_000),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "16GB",
        "16gi",
        "16 Gi",
        "-1Gi",
        "+1",
        "1e9",
        "500m",
        "1.Gi",
        ".5Gi",
        "1Gi\n",
        "\u0661Gi",
    ],
)
def test_what_is_no_size_is_answered_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="write a number with a unit such as 512Mi, 16Gi"):
        parse_size(text)


@given(st.integers(0, 2**62))
def test_formatting_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_a_quantity_keeps_its_spelling_and_knows_its_bytes() -> None:
    adapter = TypeAdapter(Quantity)
    assert adapter.validate_python("1024Mi") == "1024Mi"
    assert adapter.validate_python("1024Mi").bytes == 2**30
    assert adapter.validate_python(4096).bytes == 4096
    assert adapter.dump_python(Quantity("1Gi"), mode="json") == "1Gi"
    assert Quantity.of(2**30) == "1Gi"


@pytest.mark.parametrize("value", [True, 1.5, None, [], "x", -1, "9" * 30])
def test_a_quantity_refuses_what_is_no_size(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Quantity).validate_python(value)
