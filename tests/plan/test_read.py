"""What is written is read back equal; what is wrong in a file is named with its line."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

sys.path.insert(0, str(Path(__file__).parent))
from valid import Q_PROJ, a_plan, cluster, model, named, plans

from wavetrain.base.document import parse_json
from wavetrain.base.errors import InputError
from wavetrain.cluster import Group
from wavetrain.plan.layout import Choice
from wavetrain.plan.plan import SCHEMA, Plan
from wavetrain.plan.read import locate, read_plan, write_plan


def parsed(text: str):
    return parse_json(text, file="plan.json")


def line_of(text: str, part: str, *, after: str = "") -> int:
    """The number of the first line that has `part`, behind the one that has `after`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if after in line)
    return next(i + 1 for i, line in enumerate(lines) if i >= start and part in line)


def problems_of(text: str):
    with pytest.raises(InputError) as caught:
        read_plan(parsed(text))
    return caught.value.problems


def edited(plan: Plan, edit) -> str:
    data = json.loads(write_plan(plan))
    edit(data)
    return json.dumps(data, indent=1)


@given(plans())
@settings(max_examples=60)
def test_reading_what_was_written_gives_the_plan_back(plan):
    text = write_plan(plan)
    back = read_plan(parsed(text))
    assert back == plan
    assert write_plan(back) == text


def test_a_file_is_read_by_path_and_by_name(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(write_plan(a_plan()), encoding="utf-8")
    assert read_plan(path) == read_plan(str(path)) == a_plan()


def test_equal_plans_have_equal_text():
    """Numbers that are equal may differ in type: 1 and 1.0, 0.0 and -0.0."""
    device = replace(cluster().device, idle_w=0, inner_half=251, peak=replace(cluster().device.peak, fp64=34 * 10**12))
    other = replace(device, idle_w=-0.0, inner_half=251.0, peak=replace(device.peak, fp64=34e12))
    both = []
    for item in (device, other):
        group = Group(replace(cluster().node, device=item), 4)
        both.append(a_plan(cluster=replace(cluster(), groups=(group,))))
    assert both[0] == both[1]
    assert write_plan(both[0]) == write_plan(both[1])


def test_the_layout_comes_before_the_model():
    keys = list(json.loads(write_plan(a_plan())))
    assert keys[:2] == ["schema", "layout"]
    assert keys[-2:] == ["model", "cluster"]
    assert json.loads(write_plan(a_plan()))["schema"] == SCHEMA == "wavetrain.plan/1"


def test_what_a_planner_said_of_it_is_not_looked_into():
    extra = {"prediction": {"step_s": 1.5, "anything": [1, {"at": "all"}]}, "certificate": {}}
    assert read_plan(parsed(edited(a_plan(), lambda data: data.update(extra)))) == a_plan()


@pytest.mark.parametrize("name", ["prediction", "certificate"])
def test_what_a_planner_said_is_a_mapping(name):
    text = edited(a_plan(), lambda data: data.update({name: [1], "cut": "even"}))
    found = problems_of(text)
    assert [problem.key for problem in found] == [name, "cut"]
    assert found[0].where == f"plan.json:{line_of(text, name)}"
    assert "must be a mapping, not a list" in found[0].rule


def test_a_prediction_elsewhere_is_an_unknown_key():
    text = edited(a_plan(), lambda data: data["layout"].update(prediction={}))
    (problem,) = problems_of(text)
    assert (problem.key, problem.rule) == ("layout.prediction", "unknown key")


def test_unknown_keys_and_wrong_types_come_out_together_with_their_lines():
    def edit(data):
        data["layout"]["tpp"] = 2
        data["layout"]["dp"] = "4"
        data["recompute"] = "fully"
        del data["seq_len"]
        data["notes"] = "mine"

    text = edited(a_plan(), edit)
    found = {problem.key: problem for problem in problems_of(text)}
    assert set(found) == {"layout.tpp", "layout.dp", "recompute", "seq_len", "notes"}
    assert found["layout.tpp"].where == f"plan.json:{line_of(text, 'tpp')}"
    assert "tp" in found["layout.tpp"].nearest
    assert found["layout.dp"].where == f"plan.json:{line_of(text, 'dp')}"
    assert found["recompute"].nearest == ("full",)
    assert found["seq_len"].rule == "missing"


@pytest.mark.parametrize("schema", ["wavetrain.plan/2", "wavetrain.model/1", 1, None])
def test_another_schema_is_refused(schema):
    (problem,) = problems_of(edited(a_plan(), lambda data: data.update(schema=schema)))
    assert (problem.key, problem.legal) == ("schema", (SCHEMA,))


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "null"])
def test_a_plan_is_a_mapping(text):
    (problem,) = problems_of(text)
    assert "must be a mapping" in problem.rule
    assert problem.where == "plan.json:1"


def test_broken_rules_are_named_with_their_lines():
    choices = (*named(shard=2), *named("model.layers.{}.mlp.up_proj", shard=3))
    text = write_plan(a_plan(dp=2, global_batch=62, choices=choices, cut=(16, 0, 8, 8), schedule="chimera", waves=2))
    found = {problem.key: problem.where for problem in problems_of(text)}
    assert found == {
        "layout.dp": f"plan.json:{line_of(text, 'dp', after='layout')}",
        "layout.global_batch": f"plan.json:{line_of(text, 'global_batch')}",
        "layout.waves": f"plan.json:{line_of(text, 'waves')}",
        "choices[1].choice.shard": f"plan.json:{line_of(text, 'shard', after='up_proj')}",
        "cut[1]": f"plan.json:{line_of(text, ' 0,', after='cut')}",
    }


def test_a_rule_about_a_value_that_is_not_written_points_around_it():
    text = edited(a_plan(), lambda data: data["layout"].pop("dp"))
    (problem,) = problems_of(text)
    assert problem.key == "layout.dp"
    assert problem.where == f"plan.json:{line_of(text, 'layout')}"
    assert problem.legal == ("4",)


def test_the_model_of_a_plan_keeps_its_own_rules():
    text = edited(a_plan(), lambda data: data["model"].update(order=[]))
    (problem,) = problems_of(text)
    assert problem.key == "plan.model".removeprefix("plan.")
    assert "must have a layer" in problem.rule


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="can't be read"):
        read_plan(tmp_path / "none.json")


def test_every_preset_goes_into_a_plan():
    plan = a_plan(model=model("llama3-405b"), cut=(31, 32, 32, 31), choice=Choice(shard=4, keep=True))
    assert read_plan(parsed(write_plan(plan))) == plan


def test_locate_finds_the_innermost_node_that_is_written():
    node = parsed(write_plan(a_plan(choices=named())))
    assert locate(node, "layout.tp").value == 2
    assert locate(node, "cut[3]").value == 8
    assert locate(node, "choices[0].operator").value == Q_PROJ
    assert locate(node, "choices[7].operator") is locate(node, "choices")
    assert locate(node, "nothing[1].like.that") is node


def _places(data, path=()):
    """The way to every value of a document."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


ODD = [0, -1, 3, 1.5, 1e300, 10**18, 2**63, True, None, "", "wave", "full", "fp4", [], {}, [0], {"a": 1}]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_with_any_odd_value_is_read_or_refused(seed):
    """Nothing but an InputError that names a line, whatever stands where."""
    pick = random.Random(seed)
    whole = json.loads(write_plan(a_plan(choices=named(shard=2, slices=2), choice=Choice(shard=4, keep=True))))
    places = [place for place in _places(whole) if place[0] != "model" or pick.random() < 0.2]
    refused = 0
    for _ in range(150):
        found = ()
        data = json.loads(json.dumps(whole))
        *way, last = pick.choice(places)
        inner = data
        for step in way:
            inner = inner[step]
        inner[last] = pick.choice(ODD)
        try:
            read_plan(parsed(json.dumps(data, indent=1)))
        except InputError as error:
            found = error.problems
            refused += 1
        assert all(problem.where.startswith("plan.json:") and problem.key for problem in found)
    assert refused > 50
