"""From rows of a table to plans."""

import csv
from pathlib import Path

import pytest

from wavetrain.base.errors import InputError
from wavetrain.base.units import DType
from wavetrain.plan import AttentionImpl, Fusion, Recompute
from wavetrain.study.rows import Inexpressible, Row, plan_of, price_tables, read_rows

ROOT = Path(__file__).parent.parent.parent
PUBLISHED = ROOT / "validation" / "published.csv"
ROW = {
    "row_id": "r1",
    "source": "somebody",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "ffn": "16384",
    "vocab": "50257",
    "seq": "2048",
    "device": "a100-sxm-80gb",
    "n_gpu": "16",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "microbatch": "2",
    "global_batch": "64",
    "recompute": "full",
    "precision": "bf16",
    "measured_step_time_s": "1.5",
    "status": "ok",
    "score": "1",
}


def row(**cells):
    return Row("table.csv", 2, ROW | cells)


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({key for item in rows for key in item}))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_becomes_the_plan_it_states():
    stated = row(attention="flash1", elementwise="eager", norm_kernel="fused", mlp="gated", norm="rmsnorm", fp8="no")
    plan, assumptions = plan_of(stated)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp, plan.layout.microbatch) == (2, 2, 4, 2)
    assert plan.recompute is Recompute.FULL
    assert plan.stack.attention is AttentionImpl.FLASH1
    assert (plan.stack.elementwise, plan.stack.norm) == (Fusion.EAGER, Fusion.FUSED)
    assert plan.model.architecture.mlp == "gated"
    assert plan.cluster.num_devices == 16
    assert plan.cut == (16, 16)
    assert assumptions == ()


def test_sharding_precision_and_schedule_are_read():
    plan, _ = plan_of(
        row(shard_params="yes", shard_group="2", zero_stage="FSDP_SHARD_GRAD_OP(zero2)", grad_dtype="bf16")
    )
    assert plan.choice.shard == 2
    assert plan.choice.keep
    assert plan.precision.gradients is DType.BF16
    plan, _ = plan_of(row(shard_params="yes", zero_stage="FSDP_FULL_SHARD(zero3)", device="h100-sxm-80gb", fp8="yes"))
    assert plan.choice.shard == 4
    assert not plan.choice.keep
    assert plan.precision.products is DType.FP8
    plan, _ = plan_of(row(schedule="interleaved", vpp="4 (as published)"))
    assert (plan.layout.schedule, plan.layout.chunks) == ("interleaved", 4)
    plan, _ = plan_of(row(schedule="zb-2p"))
    assert plan.layout.schedule == "zb-h2"
    assert not plan.stack.barrier


def test_embedding_and_head_may_count_as_layers():
    plan, _ = plan_of(row(layers="30", pp="8", dp="1"))
    assert plan.cut == (3, 4, 4, 4, 4, 4, 4, 3)


def test_the_network_that_is_stated_replaces_the_usual():
    slow, _ = plan_of(row(nic_gb_per_s_per_device="6.25"))
    usual, _ = plan_of(row())
    assert slow.cluster.tiers[-1].bytes_per_s == 6.25e9
    assert usual.cluster.tiers[-1].bytes_per_s == 25e9
    odd, _ = plan_of(row(gpus_per_node="4"))
    assert odd.cluster.node.num_devices == 4


@pytest.mark.parametrize(
    ("cells", "word"),
    [
        ({"microbatch": ""}, "microbatch 1"),
        ({"recompute": "not stated"}, "recompute none"),
        ({"vocab": ""}, "vocab 51200"),
        ({"ffn": ""}, "ffn 16384"),
        ({"precision": ""}, "precision bf16"),
        ({"precision": "", "device": "v100-sxm2-32gb"}, "precision fp16"),
        ({"gpus_per_node": ""}, "gpus_per_node 8"),
    ],
)
def test_what_is_assumed_is_said(cells, word):
    assert word in plan_of(row(**cells))[1]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"layers": ""}, "layers: missing"),
        ({"layers": "many"}, "layers: must be a number, not 'many'"),
        ({"hidden": "-4"}, "hidden: must be a whole number from 1"),
        ({"hidden": "1e99"}, "hidden: must be a whole number"),
        ({"seq": "2048.5"}, "seq: must be a whole number"),
        ({"device": "a100"}, "device: unknown device 'a100', nearest a100"),
        ({"device": ""}, "device: missing"),
        ({"n_gpu": "8"}, "n_gpu: tp 2 x cp 1 x pp 2 x dp 4 is 16 devices, not 8"),
        ({"global_batch": "60"}, "global_batch: 60: must be a multiple of dp 4 x microbatch 2 = 8"),
        ({"heads": "31"}, "tp: 2: must divide the 31 attention heads"),
        ({"kv_heads": "3"}, "kv_heads: 32 heads can't be divided by 3"),
        ({"recompute": "per-op mask"}, "recompute: must be none, selective or full"),
        ({"attention": "flash9"}, "attention: must be one of unfused-torch"),
        ({"schedule": "dualpipe"}, "schedule: must be one of 1f1b"),
        ({"fp8": "maybe"}, "fp8: must be yes or no"),
        ({"fp8": "yes"}, "fp8: fp8: a100-sxm-80gb has no unit for it"),
        ({"device": "v100-sxm2-32gb"}, "precision: bf16: v100-sxm2-32gb has no unit for it"),
        ({"device": "v100-sxm2-16gb"}, "device: no node type of the catalog has v100-sxm2-16gb"),
        ({"precision": "abc"}, "precision: must be bf16, fp16, fp32 or fp8"),
        ({"kv_heads": "abc"}, "kv_heads: must be a number, not 'abc'"),
        ({"layers": "1_000"}, "layers: must be a number, not '1_000'"),
        ({"cp": "inf"}, "cp: must be a number, not 'inf'"),
        ({"vpp": "-1"}, "vpp: must be a whole number from 1"),
        ({"measured_step_time_s": "-1"}, "measured_step_time_s: must be a number above 0"),
        ({"measured_step_time_s": "soon"}, "measured_step_time_s: must be a number above 0"),
        ({"peak_mem_gb": "-1"}, "peak_mem_gb: must be a number above 0"),
        ({"score": "2"}, "score: must be one of"),
        ({"shard_params": "yes", "shard_group": "3"}, "shard_group: 3: must divide dp (4)"),
        ({"nic_gb_per_s_per_device": "0"}, "nic_gb_per_s_per_device: must be a number from 0.001"),
        ({"pp": "40", "dp": "1", "n_gpu": "80"}, "pp: 40: must be at most the 32 blocks"),
    ],
)
def test_what_cannot_be_expressed_names_the_column(cells, words):
    with pytest.raises(Inexpressible) as caught:
        plan_of(row(**cells))
    assert words in str(caught.value)


def test_every_wrong_column_is_named_at_once():
    with pytest.raises(Inexpressible) as caught:
        plan_of(row(layers="", heads="x", device="", fp8="?"))
    for column in ("layers", "heads", "device", "fp8"):
        assert f"{column}:" in str(caught.value)


def test_rows_are_never_dropped(tmp_path):
    file = write(tmp_path / "t.csv", ROW, ROW | {"row_id": "r2", "layers": ""}, ROW | {"row_id": "r3", "status": "OOM"})
    outcomes = price_tables([file])
    assert [o.row_id for o in outcomes] == ["r1", "r2", "r3"]
    assert [o.line for o in outcomes] == [2, 3, 4]
    assert outcomes[0].predicted_step_s > 0
    assert outcomes[1].reason == "layers: missing"
    assert outcomes[1].predicted_step_s is None
    assert outcomes[2].status == "OOM"


def test_a_prediction_never_looks_at_source_notes_or_row_id(tmp_path):
    named = ROW | {"source": "MosaicML", "notes": "fast", "row_id": "mosaic-1", "measured_step_time_s": "99"}
    first, second = price_tables([write(tmp_path / "t.csv", ROW | {"notes": ""}, named)])
    assert first.predicted_step_s == second.predicted_step_s
    assert first.predicted_peak_bytes == second.predicted_peak_bytes


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("row_id,layers\n1,2\n", "lacks the columns hidden"),
        (",".join(ROW) + ",layers\n", "has columns twice: layers"),
        (",".join(ROW) + "\n1,2\n", "has 2 cells where the header has"),
    ],
)
def test_a_broken_table_is_an_error_with_its_line(tmp_path, text, rule):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_rows(file)
    assert rule in str(caught.value)
    assert "t.csv:" in str(caught.value)


def test_own_table_is_complete_and_cited():
    rows = read_rows(PUBLISHED)
    assert len(rows) >= 60
    assert all(any(mark in r.text("source") for mark in ("arXiv", "README", "docs.nvidia.com")) for r in rows)
    assert all(outcome.expressible for outcome in price_tables([PUBLISHED]))
    assert len({r.text("row_id") for r in rows}) == len(rows)
