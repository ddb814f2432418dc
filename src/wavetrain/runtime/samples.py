"""`Sample`: one thing that was timed on a device or between ranks; what `wavetrain measure` fits laws to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from wavetrain.base.document import parse_yaml
from wavetrain.cluster.cluster import Cluster, Group
from wavetrain.cluster.read import load_cluster
from wavetrain.model.model import Model
from wavetrain.model.read import read_model
from wavetrain.plan.plan import Plan
from wavetrain.plan.request import Request, plan_of


@dataclass(frozen=True)
class Sample:
    """So many seconds for something of some sizes."""

    what: str  # gemm, norm-forward, all_gather, ...
    sizes: tuple[int, ...]  # rows, columns, inner; elements; bytes: as `what` has them
    seconds: float  # of one, over all passes
    dtype: str = "fp32"
    ranks: int = 1  # that did it together
    hosts: int = 1  # on which these are

    @property
    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @staticmethod
    def of(row: dict[str, Any]) -> Sample:
        return Sample(**(row | {"sizes": tuple(row["sizes"])}))


class Small(NamedTuple):
    """A model that is timed whole."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    length: int
    batch: int
    family: str = "gpt"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self[:-1]

    def model(self) -> Model:
        sizes = f"layers: {self.layers}, hidden: {self.hidden}, heads: {self.heads}, vocab: {self.vocab}"
        ffn = 8 * self.hidden // 3 if self.family == "llama" else 4 * self.hidden
        words = f"family: {self.family}, {sizes}, ffn: {ffn}, seq_len: {self.length}"
        return read_model(parse_yaml(f"{{name: small, {words}}}", file="small"))

    def sample(self, phase: str, seconds: float) -> Sample:
        """What a phase of it took: for one microbatch, the optimizer and the rest of a step once."""
        return Sample(f"{self.family}-{phase}", self.sizes, seconds)


FAMILIES = ("gpt", "llama")
TRAINED = "fp32"  # what whole models and the runtime compute in: constants that all formats share are exact for it
FORWARD, BACKWARD, OPTIMIZER, REST, AGAIN = ("forward", "backward", "optimizer", "rest", "again")
TINY, WIDE = Small(2, 32, 1, 64, 16, 1), Small(2, 384, 6, 512, 32, 1)
DEEP = Small(6, 64, 2, 256, 32, 1)
MODELS = (
    TINY,
    DEEP,
    TINY._replace(layers=1),  # few tensors: what a step takes without any
    Small(2, 64, 2, 512, 64, 2),
    Small(2, 128, 2, 1024, 64, 2),
    Small(2, 192, 3, 512, 256, 1),
    Small(2, 48, 1, 256, 32, 1, "llama"),
    Small(2, 192, 3, 1024, 128, 2, "llama"),
    Small(1, 256, 4, 512, 128, 4),
    Small(1, 512, 8, 2048, 128, 2),
)
QUICK_MODELS = MODELS[:7]


def _small(sizes: Sequence[int], family: str = "gpt") -> Small:
    layers, hidden, heads, vocab, length, batch = sizes
    return Small(layers, hidden, heads, vocab, length, batch, family)


def small_of(sample: Sample, phase: str) -> Small | None:
    """The model of which a sample is that phase; None where it is of something else."""
    family, _, own = sample.what.partition("-")
    return _small(sample.sizes, family) if family in FAMILIES and own == phase else None


def smalls(samples: Sequence[Sample], phase: str) -> dict[Small, float]:
    """What that phase took of each model that was timed whole."""
    found = ((small_of(sample, phase), sample.seconds) for sample in samples)
    return {small: seconds for small, seconds in found if small is not None}


REPLICAS, SHARDED, EMPTY = "step-replicas", "step-sharded", "step-empty"  # on all ranks
ALONE, RECOMPUTED = "step-alone", "step-recomputed"  # on each rank by itself
FEW, MESSAGES = 2, 64  # microbatches; in a pipeline that computes nothing


class StepCase(NamedTuple):
    """A whole step that is timed: a small model on all ranks, or on each by itself."""

    what: str
    small: Small
    microbatches: int  # of a replica
    ranks: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.small.sizes, self.microbatches)

    def plan(self, cluster: Cluster | None = None) -> Plan:
        """How it is run, on a cluster whose laws are to be asked, or on any."""
        cluster = cluster or _host(self.ranks)
        piped = self.what == EMPTY
        replicas = 1 if piped else self.ranks
        return plan_of(
            Request(
                model=self.small.model(),
                cluster=cluster,
                global_batch=self.small.batch * self.microbatches * replicas,
                microbatch=self.small.batch,
                pp=self.ranks if piped else 1,
                dp=replicas,
                shard="dp" if self.what == SHARDED else None,
                recompute="full" if self.what == RECOMPUTED else "none",
                precision=TRAINED,
            )
        )


def _host(devices: int) -> Cluster:
    """A host of the catalog's processors, as many as there are ranks."""
    (group,) = load_cluster("cpu-host").groups
    tiers = tuple(replace(tier, size=devices) for tier in group.node.tiers)
    return Cluster("host", (Group(replace(group.node, num_devices=devices, tiers=tiers), 1),))


def step_case(sample: Sample) -> StepCase:
    """What a sample of all ranks' step is of."""
    *small, microbatches = sample.sizes
    return StepCase(sample.what, _small(small), microbatches, sample.ranks)


def joint_cases(ranks: int) -> list[StepCase]:
    """What all ranks do together, and the same models on each alone; with one rank there is nothing to share."""
    if ranks == 1:
        return []
    deep = TINY._replace(layers=max(2, ranks))
    alone = [StepCase(ALONE, small, 1, 1) for small in (TINY, WIDE)]
    together = [StepCase(what, small, 1, ranks) for what in (REPLICAS, SHARDED) for small in (TINY, WIDE)]
    return [StepCase(EMPTY, deep, MESSAGES, ranks), *together, *alone]


def lone_cases(*, quick: bool) -> list[StepCase]:
    """What every rank does by itself."""
    models = QUICK_MODELS if quick else MODELS
    return [lone_case(ALONE, small) for small in models] + [lone_case(RECOMPUTED, DEEP)]


def lone_case(what: str, small: Small) -> StepCase:
    return StepCase(what, small, FEW, 1)
