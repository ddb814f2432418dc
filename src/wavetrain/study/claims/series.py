"""Published series of scaling, with the layouts that were run: throughput per device lost from one size to another.

Nothing here is tuned per row; what a source does not state is assumed beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from wavetrain.base.units import DType
from wavetrain.cluster.read import load_cluster
from wavetrain.model.read import load_model
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import Plan, num_stages
from wavetrain.plan.stack import AttentionImpl, Precision, Stack
from wavetrain.sim.predict import Prediction, simulate
from wavetrain.study.claims.claim import Claim, near

ONE, STACK, PRECISION = Layout(global_batch=1), Stack(), Precision()


@dataclass(frozen=True)
class Case:
    """How a series runs, whatever its number of devices; `local` is sequences per data-parallel rank."""

    model: str
    node: str
    seq_len: int
    local: int = 1
    layout: Layout = ONE  # its degrees but dp
    shard: int = 1  # 0: over all ranks
    recompute: Recompute = Recompute.NONE
    stack: Stack = STACK
    precision: Precision = PRECISION
    global_batch: int = 0  # strong scaling

    def plan(self, devices: int) -> Plan:
        model = load_model(self.model, seq_len=self.seq_len)
        dp = devices // (self.layout.tp * self.layout.cp * self.layout.pp)
        batch = self.global_batch or self.local * dp
        layout = replace(self.layout, dp=dp, global_batch=batch)
        return Plan(
            model=model,
            cluster=load_cluster(f"{self.node}:{-(-devices // 8)}"),
            layout=layout,
            cut=even_cut(model.num_blocks, num_stages(layout)),
            seq_len=self.seq_len,
            recompute=self.recompute,
            choice=Choice(shard=self.shard or dp),
            stack=self.stack,
            precision=self.precision,
        )

    def predicted(self, devices: int) -> Prediction:
        return simulate(self.plan(devices))


def batched(microbatch: int, **degrees: int) -> Layout:
    return Layout(global_batch=1, microbatch=microbatch, **degrees)  # type: ignore[arg-type]


CUDNN, HALF_GRADIENTS = Stack(attention=AttentionImpl.CUDNN), Precision(gradients=DType.BF16)
FP8 = Precision(gradients=DType.BF16, products=DType.FP8)
OVERLAPPED = Stack(attention=AttentionImpl.CUDNN, tensor_overlap=True)
FERNANDEZ = Case("llama2-7b", "dgx-h100", 4096, 2, batched(2), shard=0)
FERNANDEZ_ALONE = replace(FERNANDEZ, local=1, layout=batched(1))
NODE_SHARDS = replace(FERNANDEZ, shard=8)
TP_2 = replace(FERNANDEZ, local=4, layout=batched(4, tp=2, sequence_parallel=True))
TP_4 = replace(FERNANDEZ, local=8, layout=batched(8, tp=4, sequence_parallel=True))
MOSAIC = Case("mpt-7b", "dgx-h100", 2048, 8, batched(8), shard=0, stack=Stack(attention=AttentionImpl.TRITON))
MAXTEXT = Case("llama2-70b", "dgx-h100", 4096, 4, batched(4), 64, Recompute.FULL, CUDNN, HALF_GRADIENTS)
MAXTEXT_FP8 = replace(MAXTEXT, precision=FP8)
PAX = Case("gpt3-175b", "dgx-h100", 2048, 4, batched(4), 128, Recompute.FULL, CUDNN, FP8)
PAX_WIDE = replace(PAX, shard=0)
NEMO_LAYOUT = Layout(
    global_batch=1, tp=4, sequence_parallel=True, cp=2, pp=4, schedule="interleaved", chunks=5, shard_optimizer=True
)
NEMO = Case("llama3-70b", "dgx-h100", 8192, 64, NEMO_LAYOUT, stack=OVERLAPPED)
MEGASCALE_LAYOUT = Layout(
    global_batch=1, tp=8, sequence_parallel=True, pp=8, schedule="interleaved", chunks=6, shard_optimizer=True
)
MEGASCALE = Case(
    "gpt3-175b", "dgx-a100", 2048, layout=MEGASCALE_LAYOUT, stack=Stack(tensor_overlap=True), global_batch=768
)
LLAMA_3 = Case(
    "llama3-405b",
    "dgx-h100",
    8192,
    layout=replace(MEGASCALE_LAYOUT, pp=16, chunks=8),
    global_batch=2048,
)
NANOTRON_DP = Case("llama3.2-1b", "p5", 4096, 2, batched(2), stack=replace(STACK, bucket_bytes=25e6))
NANOTRON_TP8 = Case("llama3.2-3b", "p5", 4096, 12, batched(12, tp=8))
NANOTRON_TP16 = Case("llama3.2-3b", "p5", 4096, 16, batched(16, tp=16))


@cache
def loss(case: Case, start: int, end: int, other: Case | None = None) -> float:
    """Percent of throughput per device lost from `start` to `end` devices (of another case there)."""
    first, last = case.predicted(start), (other or case).predicted(end)
    return 100 * (last.tokens_per_s_per_device / first.tokens_per_s_per_device - 1)


@cache
def power_loss(case: Case, start: int, end: int) -> float:
    return 100 * (case.predicted(end).power_w_per_device / case.predicted(start).power_w_per_device - 1)


def recovery() -> dict[str, float]:
    """Loss at 2,048 devices against FSDP at 128, by what is done about it."""
    others = {"sharded over all": None, "sharded in the node": NODE_SHARDS, "TP 2": TP_2, "TP 4": TP_4}
    return {name: loss(FERNANDEZ, 128, 2048, other) for name, other in others.items()}


# --- the claims ---


@dataclass(frozen=True)
class Row:
    """A series from its first to its last size, in percent per device; weak scaling unless it says otherwise."""

    text: str
    published: float
    case: Case
    start: int
    end: int
    source: str
    assumption: str
    other: Case | None = None  # at the last size

    def claim(self) -> Claim:
        return Claim(
            work="Hardware scaling",
            text=f"Throughput per device, {self.text}, {self.start:,} to {self.end:,} devices",
            source=self.source,
            published=self.published,
            ours=loss(self.case, self.start, self.end, self.other),
            unit="%",
            bounds=near(self.published, TOLERANCE),
            assumption=self.assumption,
        )


TOLERANCE, POWER_TOLERANCE = 5.0, 3.2  # points
FERNANDEZ_SOURCE = "Fernandez et al., weak scaling on H100, as cited by others"
MAXTEXT_SOURCE, PAX_SOURCE = "MaxText's table for DGX H100", "Pax's table"
SEVEN = "4096-token sequences, dgx-h100, bf16, gradients fp32, no recomputation"
SEVENTY = "local batch 4 x 4096, shard group 64, full recomputation, gradients bf16"
WIDE = "local batch 4 x 2048, full recomputation"
ROWS = (
    Row("7B FSDP, 2 sequences per device", -37.2, FERNANDEZ, 128, 2048, FERNANDEZ_SOURCE, SEVEN),
    Row("7B FSDP, 1 sequence per device", -37.2, FERNANDEZ_ALONE, 128, 2048, FERNANDEZ_SOURCE, SEVEN),
    Row("MosaicML 7B FSDP", -7.7, MOSAIC, 128, 512, "llm-foundry's tables", "8 x 2048 tokens per device, dgx-h100"),
    Row("MaxText 70B BF16", -1.0, MAXTEXT, 64, 2048, MAXTEXT_SOURCE, SEVENTY),
    Row("MaxText 70B FP8", -12.0, MAXTEXT_FP8, 64, 2048, MAXTEXT_SOURCE, SEVENTY),
    Row("Pax 175B FP8, shard group 128", -7.0, PAX, 128, 2048, PAX_SOURCE, WIDE),
    Row("Pax 175B FP8, shard group of all", -7.0, PAX_WIDE, 128, 2048, PAX_SOURCE, WIDE),
    Row("NeMo 70B TP4 PP4 VP5 CP2", -1.8, NEMO, 64, 2048, "NeMo's tables", "64 microbatches of 1 x 8192 tokens"),
    Row(
        "nanotron replicas only",
        -61.0,
        NANOTRON_DP,
        8,
        256,
        "Ultra-Scale Playbook, figure of replicas",
        "1B, 2 x 4096 tokens per device, p5, buckets of 25 MB",
    ),
    Row(
        "nanotron TP8 to TP16",
        -43.0,
        NANOTRON_TP8,
        8,
        16,
        "Ultra-Scale Playbook, figure of tensor parallelism",
        "3B, microbatches of 12 and 16",
        NANOTRON_TP16,
    ),
    Row(
        "MegaScale 175B, batch 768 in all",
        -9.6,
        MEGASCALE,
        256,
        1024,
        "MegaScale, Table 2: MFU 65.3 to 59.0 %",
        "microbatch 1, tensor overlap",
    ),
    Row(
        "Llama 3 405B, batch 2,048 in all",
        -4.7,
        LLAMA_3,
        8192,
        16384,
        "Llama 3, Table 4: MFU 43 to 41 %",
        "ZeRO-1, 8 chunks, no spine",
    ),
)


def series_claims() -> Iterator[Claim]:
    for row in ROWS:
        yield row.claim()
    yield Claim(
        work="Hardware scaling",
        text="Power per device, 7B FSDP, 2 sequences per device, 128 to 2,048 devices",
        source=f"{FERNANDEZ_SOURCE}: 658 to 620 W",
        published=-5.87,
        ours=power_loss(FERNANDEZ, 128, 2048),
        unit="%",
        bounds=near(-5.87, POWER_TOLERANCE),
        assumption=SEVEN,
    )
