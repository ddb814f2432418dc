"""Units: SI inside (seconds, bytes, FLOPs), human forms only at the edges; sizes of the number formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Context, Decimal
from enum import StrEnum

KILO, MEGA, GIGA, TERA = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB = 2**10, 2**20, 2**30


class DType(StrEnum):
    """A number format that training uses."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"
    INT8 = "int8"

    @property
    def num_bytes(self) -> float:
        """Bytes one element takes in memory (tf32 is a way to multiply fp32 values)."""
        return _NUM_BYTES[self]


_NUM_BYTES = {
    DType.FP64: 8,
    DType.FP32: 4,
    DType.TF32: 4,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP8: 1,
    DType.FP4: 0.5,
    DType.INT8: 1,
}


EXACT = Context(prec=800)  # holds any sum or difference of two doubles in full


def shifted(value: float, places: int) -> float:
    """value * 10**places by moving the decimal point.

    A number of up to 15 digits comes back the same when shifted back, which a product does not promise.
    """
    return float(EXACT.scaleb(Decimal(repr(value)), places))


def printable(value: object, *, most: int = 80) -> str:
    """Text that is safe on a terminal: control and format characters escaped, shortened to `most`."""
    text = value if isinstance(value, str) else repr(value)[: most + 1]
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return text if len(text) <= most else text[: most - 3] + "..."


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A number with one of the units behind it, as people write it: 1T, 50%; None where it is none."""
    matched = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?(?:e\d{1,2})?)\s*([A-Za-z%]*)", text.strip())
    return float(matched[1]) * units[matched[2]] if matched and matched[2] in units else None


def _scaled(value: float, suffixes: tuple[str, ...], step: int, unit: str) -> str:
    size = abs(value)
    scale = 0
    while size >= step * 0.9995 and scale < len(suffixes) - 1:
        size /= step
        scale += 1
    number = f"{size:.0f}" if scale == 0 and float(size).is_integer() else f"{size:.4g}"
    return f"{'-' if value < 0 else ''}{number} {suffixes[scale]}{unit}".rstrip()


def format_count(value: float) -> str:
    """6738415616 -> '6.738 B' (parameters, tokens)."""
    return _scaled(value, ("", "k", "M", "B", "T", "quadrillion"), 1000, "")


def format_bytes(value: float) -> str:
    """Binary multiples, as memory is sold and reported: 85899345920 -> '80 GiB'."""
    return _scaled(value, ("", "Ki", "Mi", "Gi", "Ti", "Pi"), 1024, "B")


def format_rate(value: float, unit: str) -> str:
    """Decimal multiples, as links and peaks are sold: 3e11, 'B/s' -> '300 GB/s'."""
    return _scaled(value, ("", "k", "M", "G", "T", "P", "E"), 1000, unit)


def format_seconds(value: float) -> str:
    """0.0000034 -> '3.4 us'."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.4g} ns" if value else "0 s"
