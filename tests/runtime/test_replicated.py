"""Plain parameters whose gradients are added over replicas: what is sent, when, and what comes of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from wavetrain.base.errors import RunError
from wavetrain.runtime.launch import run_local
from wavetrain.runtime.replicated import Replicated
from wavetrain.runtime.world import gloo_group

WIDTH = 16
BYTES = WIDTH * WIDTH * 8  # of one weight


def chain(layers=5):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).double()


def batch(rank, microbatch=0):
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def sums(parameters_of, losses):
    """Gradients of a sum of losses in one process."""
    model = parameters_of()
    sum(loss(model) for loss in losses).backward()
    return [parameter.grad for parameter in model.parameters()]


class Sent:
    """Sizes of what is sent, in order."""

    def __init__(self, monkeypatch):
        self.sizes = []
        send = dist.all_reduce

        def noted(tensor, **more):
            self.sizes.append(tensor.numel())
            return send(tensor, **more)

        monkeypatch.setattr(dist, "all_reduce", noted)


def in_two(work):
    def inside(world):
        with gloo_group(world, timeout_s=30):
            work(world)

    run_local(inside, 2).check()


@pytest.mark.parametrize(("bucket_bytes", "alone_bytes"), [(1, 1), (1, 2 * BYTES), (2 * BYTES, 100 * BYTES)])
@pytest.mark.parametrize("hooks", [True, False])
def test_gradients_are_the_sum_over_replicas_and_microbatches(monkeypatch, bucket_bytes, alone_bytes, hooks):
    losses = [lambda m, r=r, b=b: m(batch(r, b)).square().sum() for r in range(2) for b in range(2)]
    expected = sums(chain, losses)

    def work(world):
        model = chain()
        sent = Sent(monkeypatch)
        sizes = {"bucket_bytes": bucket_bytes, "alone_bytes": alone_bytes}
        replicated = Replicated(model.parameters(), dist.group.WORLD, **sizes)
        for step in range(2):
            for microbatch in range(2):
                replicated.prepare(is_last=hooks and microbatch == 1)
                model(batch(world.rank, microbatch)).square().sum().backward()
                assert hooks or not sent.sizes
            replicated.finish()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)
            model.zero_grad()
            assert len(sent.sizes) == len(replicated.buckets) + 1, step
            sent.sizes.clear()

    in_two(work)


def test_buckets_are_filled_from_the_last_parameter_and_hold_one_format():
    model = nn.Sequential(*chain(), nn.Linear(WIDTH, WIDTH, bias=False))
    group = object()  # nothing is sent here
    number_of = {layer.weight: number for number, layer in enumerate(model)}
    buckets = Replicated(model.parameters(), group, bucket_bytes=2 * BYTES).buckets
    assert [[number_of[p] for p in bucket] for bucket in buckets] == [[5], [4, 3], [2, 1], [0]]
    few, many = ([nn.Linear(width, width, bias=False).weight for _ in range(2)] for width in (2, WIDTH))
    mixed = Replicated([*many, *few, *many], group, alone_bytes=WIDTH * WIDTH * 4).buckets
    assert [len(bucket) for bucket in mixed] == [1, 1, 1, 1, 2]  # the small ones travel together, at the end
    assert set(mixed[-1]) == set(few)
    assert Replicated(model.parameters(), None).buckets == ()


def test_a_bucket_is_sent_while_the_backward_still_runs(monkeypatch):
    def work(world):
        model = chain(4)
        sent = Sent(monkeypatch)
        replicated = Replicated(model.parameters(), dist.group.WORLD, alone_bytes=BYTES)
        seen = []
        for layer in model:
            layer.register_full_backward_pre_hook(lambda *_: seen.append(len(sent.sizes)))
        replicated.prepare(is_last=True)
        model(batch(world.rank).requires_grad_()).sum().backward()
        assert seen == [0, 1, 2, 3]
        assert len(sent.sizes) == 4
        replicated.finish()

    in_two(work)


class Branches(nn.Module):
    """One of two layers is used, and one never."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.unused, self.last = chain()

    def forward(self, x, *, left):
        return self.last((self.left if left else self.right)(self.first(x)))


@pytest.mark.parametrize("alone_bytes", [1, 100 * BYTES])
def test_ranks_may_use_different_parameters(alone_bytes):
    expected = sums(Branches, [lambda m, r=r: m(batch(r), left=r == 0).square().sum() for r in range(2)])

    def work(world):
        model = Branches()
        replicated = Replicated(model.parameters(), dist.group.WORLD, alone_bytes=alone_bytes)
        replicated.prepare(is_last=True)
        model(batch(world.rank), left=world.rank == 0).square().sum().backward()
        replicated.finish()
        assert expected[3] is None
        assert model.unused.weight.grad is None
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)

    in_two(work)


def test_a_backward_after_the_last_is_an_error_and_not_a_wrong_sum():
    def work(world):
        model = chain()
        replicated = Replicated(model.parameters(), dist.group.WORLD, alone_bytes=BYTES)
        replicated.prepare(is_last=True)
        loss = model(batch(world.rank)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RunError, match="after it had been sent"):
            loss.backward()
        replicated.finish()

    in_two(work)


def test_what_is_frozen_is_not_sent():
    model = chain(2)
    model[0].weight.requires_grad_(False)
    assert Replicated(model.parameters(), object()).parameters == (model[1].weight,)
