"""What is timed, and on which device."""

from types import SimpleNamespace

import pytest
import torch

from wavetrain.runtime import measure_compute as module
from wavetrain.runtime.measure_compute import MOST_NARROW, PRODUCTS, WIDE_PRODUCTS, compute_samples, product_sizes


class StoppedError(Exception):
    """Before anything is timed."""


def test_every_rank_computes_on_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def set_device(number: int) -> None:
        chosen.append(number)
        raise StoppedError

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(StoppedError):
        compute_samples(SimpleNamespace(rank=7, local_rank=3), device="cuda", quick=True, told=lambda *_: None)
    assert chosen == [3]


def test_models_are_where_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def materialize(_stages, *, seed: int, device: str) -> None:
        asked.append((seed, device))
        raise StoppedError

    monkeypatch.setattr(module, "materialize", materialize)
    with pytest.raises(StoppedError):
        next(module._models(device="cuda", quick=True))
    assert asked == [(0, "cuda")]


@pytest.mark.parametrize("quick", [False, True])
def test_products_in_16_bits_are_small_on_processors_only(quick: bool) -> None:
    narrow, wide = (product_sizes("bf16", device=device, quick=quick) for device in ("cpu", "cuda"))
    assert narrow
    assert all(rows * width <= MOST_NARROW for rows, width in narrow)
    assert set(wide) > set(narrow)
    assert max(wide) >= WIDE_PRODUCTS[1]
    for device in ("cpu", "cuda"):
        assert set(PRODUCTS) == set(product_sizes("fp32", device=device, quick=False))
