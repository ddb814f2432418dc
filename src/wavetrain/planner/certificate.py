"""What proves that a plan is the best: written beside it in its file, and proven anew by `verify`.

Two proofs. Of the layout: every plan of the space that a bound does not rule out is simulated again, and none is
better. Of the choices in it, where blocks and operators were chosen one by one: the inner problem is drawn up again
from the plan, and its leaves are checked in integers (`planner.leaves`), with no solver in between.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from wavetrain.cluster.cluster import Group
from wavetrain.plan.layout import Recompute
from wavetrain.plan.plan import Plan
from wavetrain.plan.read import canonical, write_plan
from wavetrain.planner import leaves
from wavetrain.planner.mixed import instance
from wavetrain.planner.mixed import plan_of as mixed_plan
from wavetrain.planner.question import Objective, Pins, Question
from wavetrain.planner.search import Answer, Found
from wavetrain.sim.predict import outline

Json = dict[str, Any]
SCHEMA = "wavetrain.certificate/1"
ROUNDING = 1e-9


def certificate(answer: Answer) -> Json:
    """The certificate of a search's best plan."""
    best = answer.found[0]
    made = {
        "schema": SCHEMA,
        "space": answer.space,
        "evaluated": answer.evaluated,
        "pruned": answer.space - answer.evaluated,
        "gap": answer.gap,
        "cost": best.cost,
        "lower": answer.lower,
        "step_s": best.outline.step_s,
        "needed_bytes": round(best.outline.needed_bytes),
        "question": _question(answer.question),
        "inner": _inner(best),
    }
    return made | {"digest": digest(best.plan, made)}


def _question(question: Question) -> Json:
    cluster = question.cluster
    return {
        "objective": str(question.objective),
        "devices": cluster.num_devices,
        "node_devices": cluster.node.num_devices,
        "pins": {name: value for name, value in asdict(question.pins).items() if value is not None},
        "only": list(question.only),
        "headroom": question.headroom,
        "power_w": question.power_w,
        "deadline_s": question.deadline_s,
        "tokens": question.tokens,
        "mixed": question.mixed,
    }


def _inner(found: Found) -> Json | None:
    if found.inner is None:
        return None
    inner = found.inner
    return {"end_shard": inner.end_shard, "sliced": inner.sliced, "proof": leaves.to_json(inner.certificate)}


def digest(plan: Plan, made: Json) -> str:
    """A fingerprint of a plan with its certificate: a change of either by accident is seen at once."""
    own = {key: value for key, value in made.items() if key != "digest"}
    text = json.dumps(canonical(own), sort_keys=True) + write_plan(plan)
    return hashlib.sha256(text.encode()).hexdigest()


def question_of(plan: Plan, made: Json) -> Question:
    """The question that a plan answers."""
    asked = made["question"]
    node = replace(plan.cluster.node, num_devices=asked["node_devices"])
    count = asked["devices"] // asked["node_devices"]
    cluster = replace(plan.cluster, groups=(Group(node, count),))
    pins = dict(asked["pins"])
    if "recompute" in pins:
        pins["recompute"] = Recompute(pins["recompute"])
    return Question(
        model=plan.model,
        cluster=plan.cluster if count * asked["node_devices"] == plan.cluster.num_devices else cluster,
        global_batch=plan.layout.global_batch,
        seq_len=plan.seq_len,
        objective=Objective(asked["objective"]),
        pins=Pins(**pins),
        only=tuple(asked["only"]),
        headroom=asked["headroom"],
        power_w=asked["power_w"],
        deadline_s=asked["deadline_s"],
        tokens=asked["tokens"],
        mixed=asked["mixed"],
        stack=plan.stack,
        precision=plan.precision,
    )


def reasons_against(plan: Plan, made: Json) -> Iterator[str]:
    """What is wrong with a certificate's figures and choices, by arithmetic alone."""
    if made["schema"] != SCHEMA:
        yield f"schema is {made['schema']}, not {SCHEMA}"
        return
    if digest(plan, made) != made["digest"]:
        yield "the digest is not that of this plan and certificate: one of them was changed"
    question = question_of(plan, made)
    seen = outline(plan, plan.cluster.laws)
    for name, said, found in (
        ("step_s", made["step_s"], seen.step_s),
        ("needed_bytes", made["needed_bytes"], seen.needed_bytes),
        ("cost", made["cost"], question.true_cost(plan, seen.step_s)),
    ):
        if abs(said - found) > ROUNDING * abs(found):
            yield f"{name} is said to be {said:,.9g}, but the plan's is {found:,.9g}"
    if seen.needed_bytes > question.capacity_bytes:
        yield f"the plan needs {seen.needed_bytes:,.0f} bytes, {question.capacity_bytes:,.0f} are there"
    if made["space"] != made["evaluated"] + made["pruned"]:
        yield "evaluated and pruned do not add up to the space"
    yield from _inner_reasons(question, plan, made)


def _inner_reasons(question: Question, plan: Plan, made: Json) -> Iterator[str]:
    inner = made["inner"]
    if inner is None:
        if plan.choices and made["gap"] == 0:  # what was only tried is not proven, and says so by its gap
            yield "the plan chooses operators one by one, but the certificate has no proof of it"
        return
    drawn = instance(question, plan.layout, inner["end_shard"], sliced=inner["sliced"])
    proof = leaves.from_json(inner["proof"])
    yield from (f"inner problem: {reason}" for reason in leaves.verify(drawn.problem, proof))
    if proof.selection is None or mixed_plan(drawn, proof.selection) != plan:
        yield "inner problem: the selection is not the plan's"
