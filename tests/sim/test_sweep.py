"""Columns of layouts are priced as a plan for each would be."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from plans import LAWS, model_of, plan_of

from wavetrain.cluster import load_cluster
from wavetrain.plan.layout import Choice, Recompute
from wavetrain.sim.estimate import SCHEDULE_KINDS, estimate
from wavetrain.sim.gather import gather
from wavetrain.sim.memory import memory
from wavetrain.sim.sweep import Layouts, sweep

KINDS = {"1f1b": (1,), "gpipe": (1,), "interleaved": (2, 3), "wave": (2, 4), "zb-h1": (1,), "wave-zb": (2,)}


@st.composite
def rows(draw):
    """One layout of 16 blocks on 16 devices, as columns state it."""
    tp, pp = draw(st.sampled_from(((1, 1), (2, 2), (4, 4), (1, 4), (8, 1), (2, 8))))
    dp = 16 // tp // pp
    schedule = draw(st.sampled_from(sorted(KINDS))) if pp > 1 else "1f1b"
    stages = draw(st.sampled_from(KINDS[schedule]))
    shard = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if dp % n == 0]))
    return {
        "tp": tp,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "cp": 1,
        "dp": dp,
        "pp": pp,
        "pp_inside": pp > 1 and draw(st.booleans()),
        "schedule": SCHEDULE_KINDS.index(schedule),
        "stages": stages,
        "microbatch": draw(st.sampled_from((1, 2))),
        "microbatches": pp * draw(st.integers(1, 3)),
        "recompute": draw(st.integers(0, 2)),
        "shard": shard,
        "keep": shard > 1 and draw(st.booleans()),
        "shard_optimizer": draw(st.booleans()),
    }


DEGREES = ("tp", "sequence_parallel", "cp", "dp", "pp", "pp_inside", "microbatch", "shard_optimizer")


def columns(items):
    flags = ("sequence_parallel", "pp_inside", "keep", "shard_optimizer")
    return Layouts(
        **{key: np.array([row[key] for row in items], dtype=bool if key in flags else np.intp) for key in items[0]}
    )


def plan_for(row, model, cluster):
    schedule = SCHEDULE_KINDS[row["schedule"]]
    waved = schedule.startswith("wave")
    degrees = {key: row[key] for key in DEGREES}
    plan = plan_of(
        model,
        cluster,
        global_batch=row["microbatches"] * row["microbatch"] * row["dp"],
        schedule=schedule,
        chunks=1 if waved else row["stages"],
        waves=row["stages"] // 2 if waved else 1,
        **degrees,
    )
    return replace(
        plan, recompute=tuple(Recompute)[row["recompute"]], choice=Choice(shard=row["shard"], keep=row["keep"])
    )


@settings(max_examples=25)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_a_sweep_prices_like_plans(items):
    model, cluster = model_of("gpt3-1.3b", 50), load_cluster("dgx-a100:2")
    batch = sweep(model, cluster, columns(items), seq_len=512)
    found, held = estimate(batch, LAWS), memory(batch, LAWS)
    for number, row in enumerate(items):
        alone = gather([plan_for(row, model, cluster)])
        assert found.step_s[number] == pytest.approx(estimate(alone, LAWS).step_s[0], rel=1e-12)
        assert held.peak_bytes[number] == pytest.approx(memory(alone, LAWS).peak_bytes[0], rel=1e-12)


def test_columns_of_unequal_length_are_refused():
    whole = columns(
        [dict.fromkeys(Layouts.__dataclass_fields__, 1) | {"sequence_parallel": False, "keep": False, "cp": 1}]
    )
    with pytest.raises(ValueError, match="same length"):
        replace(whole, tp=np.array([1, 2]))
