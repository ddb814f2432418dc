"""What a step costs."""

from __future__ import annotations

SECONDS_PER_HOUR = 3600.0


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    """Price of the devices for the time that a million tokens take, US dollars."""
    return usd_per_hour / SECONDS_PER_HOUR / tokens_per_s * 1e6
