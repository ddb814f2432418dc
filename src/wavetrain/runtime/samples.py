"""`Sample`: one thing that was timed on a device or between ranks; what `wavetrain measure` fits laws to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wavetrain.base.document import parse_yaml
from wavetrain.cluster.cluster import Cluster
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


class Small(NamedTuple):
    """A model that is timed whole."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    length: int
    batch: int

    def model(self) -> Model:
        sizes = f"layers: {self.layers}, hidden: {self.hidden}, heads: {self.heads}, vocab: {self.vocab}"
        return read_model(parse_yaml(f"{{name: small, family: gpt, {sizes}, seq_len: {self.length}}}", file="small"))


REPLICAS, SHARDED, PIPELINE = "step-replicas", "step-sharded", "step-pipeline"
RECOMPUTED, EMPTY = "step-recomputed", "step-empty"
TINY, WIDE = Small(2, 32, 1, 64, 16, 1), Small(2, 384, 6, 512, 32, 1)
FEW, MANY, MESSAGES = 2, 16, 64  # microbatches in a pipeline; in one that computes nothing


class StepCase(NamedTuple):
    """A whole step that is timed: a small model on all ranks."""

    what: str
    small: Small
    microbatches: int  # of a replica
    ranks: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.small, self.microbatches)

    def plan(self, cluster: Cluster | None = None) -> Plan:
        """How it is run, on a cluster whose laws are to be asked, or on any."""
        if cluster is None:
            cluster = load_cluster(f"cpu-host:{(self.ranks + 1) // 2}").part(self.ranks)
        piped = self.what in (PIPELINE, RECOMPUTED, EMPTY)
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
                precision="fp32",
            )
        )


def step_case(sample: Sample) -> StepCase:
    """What a sample is of."""
    *small, microbatches = sample.sizes
    return StepCase(sample.what, Small(*small), microbatches, sample.ranks)


def step_cases(ranks: int) -> list[StepCase]:
    """With one rank there is nothing to share."""
    deep = TINY._replace(layers=max(2, ranks))
    cases = [(PIPELINE, deep, FEW), (PIPELINE, deep, MANY), (RECOMPUTED, deep, MANY)]
    if ranks > 1:
        cases.append((EMPTY, deep, MESSAGES))
        cases += [(what, small, 1) for what in (REPLICAS, SHARDED) for small in (TINY, WIDE)]
    return [StepCase(*case, ranks) for case in cases]
