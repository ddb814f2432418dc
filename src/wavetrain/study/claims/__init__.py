"""Claims of three published works, each with its source, what we simulate, what was executed, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator

from wavetrain.study.claims.claim import WORKS, Bounds, Claim, Executed, Verdict, Work
from wavetrain.study.claims.hanayo import hanayo_claims
from wavetrain.study.claims.osdp import osdp_claims
from wavetrain.study.claims.scaling import Records, scaling_claims
from wavetrain.study.claims.series import series_claims

__all__ = ["WORKS", "Bounds", "Claim", "Executed", "Records", "Verdict", "Work", "all_claims"]


def all_claims(records: Records) -> Iterator[Claim]:
    """Every claim; `records(name)` gives the records of the ready study of that name."""
    yield from hanayo_claims()
    yield from osdp_claims()
    yield from scaling_claims(records)
    yield from series_claims()
