"""What is timed, and on which device."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from wavetrain.runtime import measure_compute as module
from wavetrain.runtime.measure_compute import MOST_NARROW, PRODUCTS, WIDE_PRODUCTS, Case, compute_samples, product_sizes
from wavetrain.runtime.progress import Progress


class StoppedError(Exception):
    """Before anything is timed."""


def test_every_rank_computes_on_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def set_device(number: int) -> None:
        chosen.append(number)
        raise StoppedError

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(StoppedError):
        compute_samples(SimpleNamespace(local_rank=3), lambda *_: None, device="cuda", quick=True, passes=1)
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


def test_a_sample_is_the_lower_quartile_of_passes_and_the_lesser_median_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, told, found, places = HashStore(), [], {}, []
    took = iter([5.0, 1.0, 2.0, 9.0, 7.0, 3.0, 4.0, 8.0])  # rank 1's, then rank 0's
    case = Case("gemm-forward", (1, 2, 3), lambda: lambda: None, 2)
    monkeypatch.setattr(module, "_all_cases", lambda *_, **__: [case])
    monkeypatch.setattr(module, "_seconds", lambda *_: next(took))
    monkeypatch.setattr(module, "settle", places.append)
    for rank in (1, 0):
        world = SimpleNamespace(rank=rank, size=2, store=store, progress=Progress(rank=rank), place=rank)
        words = {"device": "cpu", "quick": True, "passes": 4}
        (found[rank],) = compute_samples(world, lambda *words: told.append(words), **words)
    assert [share for _, share in told] == [0.0, 0.25, 0.5, 0.75] * 2
    assert places == [1, 0]
    assert (found[1].seconds, found[0].seconds) == (2.0 / 2, 2.0 / 2), "of 1 2 5 9 and 3 4 7 8, halved"
    assert (found[0].what, found[0].sizes) == (case.what, case.sizes)
