"""The exhaustive form of what the tests sample; run by `make soak`, results in docs/soak.md.

Every cap that holds one microbatch, for P <= 8, W <= 4 and eight values of M up to 32, on snakes and loops, split and
not: a valid list schedule. `derive` starts from such lists and keeps the best order, so it has a valid one, too.
"""

import sys
import time
from fractions import Fraction

from wavetrain.schedule import Costs, Shape, verify
from wavetrain.schedule.derive import slots
from wavetrain.schedule.listing import list_schedule, wave_priority
from wavetrain.schedule.placement import loop, snake
from wavetrain.schedule.schedules import SCHEDULES

BATCHES = (1, 2, 3, 5, 8, 13, 16, 32)


def caps_are_honoured(ranks_most: int, waves_most: int, batches: tuple[int, ...]) -> int:
    """List scheduling under every cap; how many orders were drawn up and proven."""
    count = 0
    for ranks in range(2, ranks_most + 1):
        for waves in range(1, waves_most + 1):
            for placement in (snake(ranks, waves), loop(ranks, 2 * waves)):
                for m in batches:
                    for chunks in range(2 * waves, 2 * waves * min(ranks, m) + 1):
                        cap = Fraction(chunks, 2 * waves)
                        for split in (False, True):
                            order = list_schedule(
                                placement,
                                m,
                                Costs.uniform(placement.num_stages),
                                priority=wave_priority(placement),
                                caps=slots(placement, m, cap),
                                split=split,
                            )
                            verify(order, cap=cap, microbatches=m)
                            count += 1
    return count


def every_kind_is_proven(ranks_most: int, more_most: int, batches_most: int) -> int:
    """Every schedule of the table at every small size."""
    count = 0
    for name, schedule in SCHEDULES.items():
        for ranks in range(2, ranks_most + 1):
            if schedule.even_ranks and ranks % 2:
                continue
            for more in range(1, more_most + 1) if schedule.chunked or schedule.waved else (1,):
                for m in range(1, batches_most + 1):
                    verify(schedule.order(Shape(ranks, m, chunks=more, waves=more)), microbatches=m)
                    count += 1
        print(f"  {name}: proven", file=sys.stderr)
    return count


if __name__ == "__main__":
    start = time.perf_counter()
    print(f"every kind, P <= 8, W and v <= 4, M <= 20: {every_kind_is_proven(8, 4, 20):,} schedules proven")
    orders = caps_are_honoured(8, 4, BATCHES)
    print(f"every cap, P <= 8, W <= 4, M of {BATCHES}: {orders:,} list schedules proven and within their cap")
    print(f"{time.perf_counter() - start:.0f} s")
