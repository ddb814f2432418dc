"""Plans as JSON: what `write_plan` writes, `read_plan` reads back to an equal plan.

A plan file holds all of its model and cluster, so it means the same everywhere. It may also hold what its planner said
of it, under `prediction` and `certificate`: mappings that are not part of the plan and not looked into here. Any other
key that is not a plan's is an error.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from wavetrain.base.codec import decode, dumps, encode
from wavetrain.base.document import Node, read_document
from wavetrain.base.errors import InputError, Problem
from wavetrain.plan.check import check
from wavetrain.plan.plan import SCHEMA, Plan

BESIDE = ("prediction", "certificate")  # what a plan file may hold that is not the plan
LONG = ("model", "cluster")  # written last: a reader looks for the layout first
EXACT = 2**53  # up to here a float that is whole is that whole number and no other

_STEP = re.compile(r"[^.\[\]]+")


def read_plan(source: Node | Path | str) -> Plan:
    """Read a plan from a file or a parsed document; everything that is wrong with it is raised at once."""
    node = source if isinstance(source, Node) else read_document(Path(source))
    own, problems = _without_beside(node)
    try:
        plan = decode(Plan, own, schema=SCHEMA)
    except InputError as error:
        named = (replace(problem, key=problem.key.removeprefix("plan.")) for problem in error.problems)
        raise InputError([*problems, *named]) from None
    problems += (replace(problem, where=locate(node, problem.key).where) for problem in check(plan))
    if problems:
        raise InputError(problems)
    return plan


def write_plan(plan: Plan, **beside: Any) -> str:
    """A plan as text, the same for equal plans: numbers that are whole are written whole, wherever they came from.

    `beside` is what its planner says of it, under the names of BESIDE.
    """
    unknown = set(beside) - set(BESIDE)
    if unknown:
        raise ValueError(f"a plan file has no place for {', '.join(sorted(unknown))}")
    data = encode(plan, schema=SCHEMA)
    long = {key: data.pop(key) for key in LONG}
    return dumps(canonical(data | {key: beside[key] for key in BESIDE if key in beside} | long))


def locate(node: Node, key: str) -> Node:
    """The node that a key such as `choices[2].choice.shard` means, or the innermost one around it that is written."""
    for step in _STEP.findall(key):
        items = node.value
        if isinstance(items, dict) and step in items:
            node = items[step]
        elif isinstance(items, tuple) and step.isdecimal() and int(step) < len(items):
            node = items[int(step)]
        else:
            break
    return node


def _without_beside(node: Node) -> tuple[Node, list[Problem]]:
    """The document without what stands beside the plan in it."""
    if not isinstance(node.value, dict):
        return node, []
    beside = {key: item for key, item in node.value.items() if key in BESIDE}
    wrong = [
        Problem(where=item.where, key=key, rule=f"must be a mapping, not {item.what}")
        for key, item in beside.items()
        if not isinstance(item.value, dict)
    ]
    return replace(node, value={key: item for key, item in node.value.items() if key not in beside}), wrong


def canonical(value: Any) -> Any:
    """Data as it is written: numbers that are whole are whole."""
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return value
