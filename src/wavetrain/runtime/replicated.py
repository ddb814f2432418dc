"""Parameters that every replica has whole: their gradients are added over all replicas once per step.

Bucket by bucket, from the last parameter to the first, each as soon as the last backward of a step has completed it, so
that most of the sending is done while that backward still runs (as DistributedDataParallel does it). Buckets leave in
one order on all ranks, whatever the order in which gradients arrive. Sums only: the scaling rule has divided already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavetrain.base.errors import RunError
from wavetrain.runtime.spent import charged

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's
ALONE_BYTES = 2**20  # of a gradient that is sent by itself, from where it is: no copy, no new memory


class Replicated:
    """The sums of one step's gradients, on their way."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        alone_bytes: int = ALONE_BYTES,
    ) -> None:
        """`group` has all replicas; None where there is one only, and nothing is sent."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.parameters = tuple(reversed(trained))
        self.group = group
        made = _buckets(self.parameters, bucket_bytes, alone_bytes) if group is not None else ()
        self.buckets = tuple(made)
        self._awaited: list[set[nn.Parameter]] = []  # by bucket, while a last backward runs
        self._num_sent = 0  # buckets
        self._is_open = self._is_sent = False
        self._works: list[dist.Work] = []
        self._without: list[tuple[nn.Parameter, Tensor]] = []  # no gradient here, and the place of one from elsewhere
        self._present: Tensor | None = None  # on how many ranks each parameter has a gradient
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                hook = partial(self._arrived, number)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def prepare(self, *, is_last: bool) -> None:
        """Whether the next backward completes the step's gradients."""
        self._is_open, self._is_sent, self._num_sent = is_last, False, 0
        self._awaited = [set(bucket) for bucket in self.buckets] if is_last else []

    def send(self) -> None:
        """After the last backward: send what has not left yet. Those of other stages must not come in between."""
        if not self._is_sent and self.buckets:
            self._send_up_to(len(self.buckets))
            missing = {parameter for parameter, _ in self._without}
            values = [float(parameter not in missing) for parameter in self.parameters]
            self._present = torch.tensor(values, device=self.parameters[0].device)
            self._launch(self._present)
        self._is_open, self._is_sent = False, True

    def finish(self) -> None:
        """Wait for all sums; gradients are those of the whole step then."""
        self.send()
        for work in self._works:
            charged("reduction", work.wait)()
        if self._without and self._present is not None:
            counts = dict(zip(self.parameters, self._present.tolist(), strict=True))
            for parameter, place in self._without:
                parameter.grad = place if counts[parameter] else None
        self._works, self._without, self._present = [], [], None

    def _arrived(self, number: int, parameter: nn.Parameter) -> None:
        if not self._is_open:
            return
        if number < self._num_sent:
            raise RunError("a gradient was added to after it had been sent: one backward too many was the last")
        self._awaited[number].discard(parameter)
        ready = self._num_sent
        while ready < len(self.buckets) and not self._awaited[ready]:
            ready += 1
        self._send_up_to(ready)

    def _send_up_to(self, end: int) -> None:
        for bucket in self.buckets[self._num_sent : end]:
            self._launch(self._joined(bucket))
        self._num_sent = end

    def _joined(self, bucket: Sequence[nn.Parameter]) -> Tensor:
        """A bucket's gradients as one tensor, of which they are views from now on: there is one copy at any time."""
        first = bucket[0]
        if len(bucket) == 1 and first.grad is not None and first.grad.is_contiguous():
            return first.grad
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = torch.split_with_sizes(joined, [p.numel() for p in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            place = part.view(parameter.shape)
            if parameter.grad is None:
                self._without.append((parameter, place))
            else:
                parameter.grad = place
        return joined

    def _launch(self, tensor: Tensor) -> None:
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        self._works.append(work)


def _buckets(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, alone_bytes: int
) -> Iterator[tuple[nn.Parameter, ...]]:
    """Large ones alone, small ones of one format together."""
    together: list[nn.Parameter] = []
    for parameter in parameters:
        if _num_bytes([parameter]) >= alone_bytes:
            yield (parameter,)
            continue
        differs = together and (parameter.dtype, parameter.device) != (together[0].dtype, together[0].device)
        if differs or _num_bytes(together) >= bucket_bytes:
            yield tuple(together)
            together = []
        together.append(parameter)
    if together:
        yield tuple(together)


def _num_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
