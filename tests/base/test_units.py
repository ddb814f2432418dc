import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavetrain.base.units import DType, format_bytes, format_count, format_rate, format_seconds, printable, shifted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(85899345920), "80 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_count(6738415616), "6.738 B"),
        (format_count(999), "999"),
        (format_count(999_999), "1 M"),
        (format_count(-1500), "-1.5 k"),
        (format_rate(3e11, "B/s"), "300 GB/s"),
        (format_seconds(3.4e-6), "3.4 us"),
        (format_seconds(0), "0 s"),
        (format_seconds(2.5e-10), "0.25 ns"),
        (format_seconds(90), "90 s"),
    ],
)
def test_formats(text, expected):
    assert text == expected


def test_every_dtype_has_a_size():
    assert [dtype.num_bytes for dtype in DType] == [8, 4, 4, 2, 2, 1, 0.5, 1]


@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(-30, 30), st.integers(-12, 12))
def test_shifting_back_is_exact_for_fifteen_digits(digits, exponent, places):
    value = float(f"{digits}e{exponent}")
    assert shifted(shifted(value, places), -places) == value


def test_shift_of_a_written_decimal_is_what_it_says():
    assert shifted(3.4, -6) == 3.4e-06
    assert shifted(shifted(3.4, -6), 6) == 3.4


@given(st.text(max_size=300))
def test_printable_is_safe_and_short(text):
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= 80


def test_printable_escapes_terminal_codes():
    assert printable("a\x1b[31mb") == "a\\x1b[31mb"
    assert printable("x" * 100) == "x" * 77 + "..."
