"""A certificate proves its plan anew, and nothing that was changed passes."""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
from plans import model_of, with_device

from wavetrain.cluster import load_cluster
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import EVERY, OperatorChoice
from wavetrain.plan.read import read_plan, write_plan
from wavetrain.planner.ask import question
from wavetrain.planner.certificate import certificate, digest
from wavetrain.planner.prove import prove
from wavetrain.planner.search import search


@pytest.fixture(scope="module")
def mixed():
    cluster = with_device(load_cluster("dgx-a100:1"), memory_bytes=int(16e9))
    asked = question(model_of("gpt3-1.3b", 24), cluster, global_batch=64, seq_len=2048, tp=1, cp=1, pp=1)
    answer = search(asked)
    assert answer.gap == 0
    assert answer.best.choices
    return answer.best, certificate(answer)


@pytest.fixture(scope="module")
def pipeline():
    asked = question(model_of("gpt3-1.3b", 8), load_cluster("dgx-a100:1"), global_batch=16, pp=4, tp=2, dp=1)
    answer = search(asked)
    return answer.best, certificate(answer)


@pytest.mark.parametrize("which", ["mixed", "pipeline"])
def test_a_certificate_from_its_file_is_proven(which, request, tmp_path):
    plan, made = request.getfixturevalue(which)
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan, certificate=made, prediction={}))
    read = json.loads(path.read_text())["certificate"]
    assert read_plan(path) == plan
    assert prove(read_plan(path), read).is_proven


def sealed(plan, made):
    """A forger's certificate: the digest is right again."""
    return made | {"digest": digest(plan, made)}


def other_plan(plan, made):
    fewer = tuple(item for item in plan.choices if item.operator == EVERY)[:-1]
    return replace(plan, choices=fewer), made


def uniform_plan(plan, made):
    return replace(plan, choices=(), choice=Choice(shard=8)), made


def sharded_more(plan, made):
    block = plan.blocks[0].layer
    return replace(plan, choices=(OperatorChoice(block, EVERY, Choice(shard=8)),)), made


def changed(**values):
    return lambda plan, made: (plan, made | values)


def scaled(key, factor):
    return lambda plan, made: (plan, made | {key: made[key] * factor})


def asked(**values):
    return lambda plan, made: (plan, made | {"question": made["question"] | values})


def proof(change):
    def tamper(plan, made):
        copy = deepcopy(made)
        change(copy["inner"])
        return plan, copy

    return tamper


def no_cases(inner):
    inner["proof"]["cases"] = []


def lower_time(inner):
    inner["proof"]["time"] -= 1000


def higher_bound(inner):
    inner["proof"]["lower"] += 10**15


def other_problem(inner):
    inner["proof"]["problem"] = "0" * 64


def other_ends(inner):
    inner["end_shard"] = 8 if inner["end_shard"] == 1 else 1


TAMPERINGS = {
    "another plan": other_plan,
    "a uniform plan": uniform_plan,
    "a plan that shards more": sharded_more,
    "a faster step": scaled("step_s", 0.99),
    "less memory": scaled("needed_bytes", 0.9),
    "a lower cost": scaled("cost", 0.99),
    "a bound above the best": scaled("lower", 1.01),
    "a smaller space": scaled("space", 0.5),
    "a larger gap hidden": lambda plan, made: (plan, made | {"lower": made["lower"] * 0.9, "gap": 0.0}),
    "counts that do not add up": lambda plan, made: (plan, made | {"evaluated": made["evaluated"] + 1}),
    "less memory asked for": asked(headroom=0.3),
    "another objective": asked(objective="devices"),
    "no proof of the choices": changed(inner=None),
    "a proof without cases": proof(no_cases),
    "a proof of a shorter time": proof(lower_time),
    "a proof of a higher bound": proof(higher_bound),
    "a proof of another problem": proof(other_problem),
    "ends cut otherwise": proof(other_ends),
    "a key that is gone": lambda plan, made: (plan, {k: v for k, v in made.items() if k != "cost"}),
    "another schema": changed(schema="wavetrain.certificate/0"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_was_changed_is_rejected(mixed, name):
    """Also by one who seals it anew."""
    plan, made = TAMPERINGS[name](*mixed)
    assert not prove(plan, made).is_proven
    if "cost" in made:
        assert not prove(plan, sealed(plan, made)).is_proven
