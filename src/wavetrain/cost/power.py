"""What a device draws while it trains, from what it does with its time."""

from __future__ import annotations

from wavetrain.cluster.cluster import Device
from wavetrain.cluster.laws import Laws

WAITING = ("bubble", "transfer", "stragglers", "host")
COMMUNICATING = ("tensor", "context", "sharding", "reduction", "gather")


def device_watts(device: Device, breakdown: dict[str, float], laws: Laws) -> float:
    """Mean draw of one device over a step, watts.

    Compute draws `busy_w`; visible communication and waiting draw a share of it above idle: a waiting kernel keeps its
    processors spinning. Source: the constants' (`laws.yaml`).
    """
    total = sum(breakdown.values())
    if total <= 0:
        return device.idle_w
    waiting = sum(breakdown.get(name, 0.0) for name in WAITING) / total
    communicating = sum(breakdown.get(name, 0.0) for name in COMMUNICATING) / total
    computing = 1.0 - waiting - communicating
    active = computing + laws.communication_power * communicating + laws.waiting_power * waiting
    return device.idle_w + (device.busy_w - device.idle_w) * active
