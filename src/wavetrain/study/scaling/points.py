"""`Point`: one question of a study, all of whose words are resolved; and the key that its answer is kept under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from typing import Any

from wavetrain.base.codec import encode
from wavetrain.base.units import format_bytes
from wavetrain.cluster.cluster import Cluster, Group
from wavetrain.cluster.read import load_cluster
from wavetrain.model.model import Model
from wavetrain.model.read import load_model
from wavetrain.plan.layout import Recompute
from wavetrain.planner.ask import question
from wavetrain.planner.question import Question
from wavetrain.study.scaling.spec import Batch, Failures, Strategy, Study

CODE = ("base", "cluster", "cost", "model", "plan", "planner", "schedule", "sim", "timeline", "study/scaling")


@dataclass(frozen=True)
class Alike:
    """What is asked at every point of a study alike."""

    tokens: float | None
    failures: Failures | None
    what_if: tuple[str, ...]
    time_limit_s: float
    precision: str | None


@dataclass(frozen=True)
class Point:
    """A combination of what a study sweeps."""

    model: str
    seq_len: int | None
    node: str
    device: str | None
    memory_bytes: float | None
    devices: int
    batch: Batch
    strategy: Strategy
    objective: str
    alike: Alike

    @property
    def node_words(self) -> str:
        """The kind of node, and what of it is not as it comes."""
        with_words = [] if self.device is None else [self.device]
        with_words += [] if self.memory_bytes is None else [format_bytes(self.memory_bytes)]
        return f"{self.node} with {' and '.join(with_words)}" if with_words else self.node


def points(study: Study) -> Iterator[Point]:
    """All points of a study, the devices innermost."""
    hardware = (study.nodes, study.device_kinds, study.memories)
    alike = Alike(study.tokens, study.failures, study.what_if, study.time_limit_s, study.precision)
    axes = (study.models, study.seq_lens, *hardware, study.batches, study.objectives, study.strategies)
    for model, seq_len, node, device, memory_bytes, batch, objective, strategy in product(*axes):
        for devices in study.devices:
            where = (node, device, memory_bytes, devices)
            yield Point(model, seq_len, *where, batch, strategy, objective, alike)


# --- what the words mean ---


@lru_cache(maxsize=64)
def model_of(name: str, seq_len: int | None) -> Model:
    return load_model(name, seq_len=seq_len)


@lru_cache(maxsize=64)
def node_of(name: str, device: str | None, memory_bytes: float | None) -> Cluster:
    """One node of a kind, with another device or less memory where that is said."""
    cluster = load_cluster(name)
    node = cluster.node if device is None else replace(cluster.node, device=load_cluster(device).device)
    if memory_bytes is not None:
        node = replace(node, device=replace(node.device, memory_bytes=round(memory_bytes)))
    return replace(cluster, name=name.partition(":")[0], groups=(Group(node, 1),))


def cluster_of(point: Point) -> Cluster:
    """The devices of a point: so many nodes, or a part of one."""
    one = node_of(point.node, point.device, point.memory_bytes)
    if point.devices < one.num_devices:
        return one.part(point.devices)
    count = point.devices // one.num_devices
    return replace(one, name=f"{one.name}:{count}", groups=(Group(one.node, count),))


def question_of(point: Point, cluster: Cluster | None = None) -> Question:
    """What is asked at a point: all its devices are used."""
    pins = dict(point.strategy.pins)
    if "recompute" in pins:
        pins["recompute"] = Recompute(pins["recompute"])
    stated: dict[str, Any] = {"precision": point.alike.precision} if point.alike.precision else {}
    return question(
        model_of(point.model, point.seq_len),
        cluster or cluster_of(point),
        global_batch=point.batch.at(point.devices),
        objective=point.objective,
        only=point.strategy.only,
        mixed=point.strategy.mixed,
        devices=point.devices,
        **pins,
        **stated,
    )


# --- the key ---


def key_of(point: Point) -> str:
    """A digest of all that the answer depends on: model, node, what is asked, and the code that answers."""
    node = _node_content(point.node, point.device, point.memory_bytes)
    asked = asdict(point) | {"model": _content(point.model, point.seq_len), "node": node}
    del asked["strategy"]["name"]  # another name is the same question
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.sha256(f"{code_digest()}{text}".encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _content(name: str, seq_len: int | None) -> str:
    return json.dumps(encode(model_of(name, seq_len)), sort_keys=True)


@lru_cache(maxsize=64)
def _node_content(name: str, device: str | None, memory_bytes: float | None) -> str:
    cluster = node_of(name, device, memory_bytes)
    return json.dumps(encode(cluster), sort_keys=True) + json.dumps(encode(cluster.laws), sort_keys=True)


@cache
def code_digest() -> str:
    """A digest of the code and data that predictions come from: a change of either makes old answers stale."""
    digest = hashlib.sha256()
    for folder in CODE:
        for name, content in sorted(_files(resources.files("wavetrain").joinpath(folder), folder)):
            digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def _files(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.name.endswith((".py", ".yaml")) and entry.is_file():
            yield f"{name}/{entry.name}", entry.read_bytes()
        elif entry.is_dir() and entry.name not in ("__pycache__", "ready"):
            yield from _files(entry, f"{name}/{entry.name}")
