"""`wavetrain train`, as users call it."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Ran
from tests.runtime.plans import small_plan

from wavetrain.plan import Plan
from wavetrain.plan.read import write_plan
from wavetrain.schedule import parse_text
from wavetrain.trace.chrome import read_chrome

Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The command sets up the root logger; put it back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def plan_file(tmp_path: Path, plan: Plan) -> str:
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan))
    return str(path)


def test_trains_and_says_what_happened(run: Run, tmp_path: Path) -> None:
    file = plan_file(tmp_path, small_plan(pp=2, waves=2, microbatches=4, blocks=8))
    ran = run("train", file, "--local", "2", "--steps", "12", "-o", str(tmp_path / "run"), "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["schema"] == "wavetrain.train/1"
    assert len(document["losses"]) == 12
    assert document["losses"][0] == pytest.approx(math.log(61), rel=0.1)
    assert document["losses"][-1] < document["losses"][0] - 0.1
    assert 0 < document["replayed"]["step_s"] <= document["timeline_s"] + 1e-6  # no transfer: never longer
    actions = parse_text((tmp_path / "run" / "actions.txt").read_text(), file="actions.txt")
    measured = read_chrome(tmp_path / "run" / "measured.json")
    for rank, row in enumerate(actions.ranks):
        computed = tuple(str(action) for action in row if "SEND" not in str(action) and "RECV" not in str(action))
        assert measured.order(rank, "compute") == computed
    assert read_chrome(tmp_path / "run" / "replayed.json").ranks == (0, 1)
    assert "replayed" in (tmp_path / "run" / "timelines.svg").read_text()
    assert set(document["files"]) <= {str(path) for path in (tmp_path / "run").iterdir()}


def test_every_layout_trains_to_the_same_losses(run: Run, tmp_path: Path) -> None:
    """Initial values and data do not depend on the layout; a step's gradient sums differ by order only."""
    losses = []
    for pp, schedule, waves in ((1, "1f1b", None), (2, "1f1b", None), (2, "wave", 2), (2, "wave-zb", 1)):
        plan = small_plan(pp=pp, schedule=schedule, waves=waves, microbatches=4, blocks=8, tied=True)
        ran = run("train", plan_file(tmp_path, plan), "--local", str(pp), "--steps", "5", "--json")
        assert ran.code == 0, ran.err
        losses.append(json.loads(ran.out)["losses"])
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_any_text_is_learnt(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again, " * 200)
    file = plan_file(tmp_path, small_plan(pp=2, microbatches=4, blocks=8, vocab=256))
    ran = run("train", file, "--local", "2", "--steps", "12", "--data", str(text), "--learning-rate", "0.01", "--json")
    assert ran.code == 0, ran.err
    losses = json.loads(ran.out)["losses"]
    assert losses[-1] < losses[0] - 1


def test_data_that_does_not_fit_the_model_is_refused(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    for plan, word in ((small_plan(vocab=61), "256"), (small_plan(vocab=256), "17")):
        ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--data", str(text))
        assert ran.code == 2
        assert word in ran.err


def test_two_copies_of_a_model_have_one_loss(run: Run, tmp_path: Path) -> None:
    """Chimera's chains end on two ranks; the step's loss is the sum of what both add."""
    found = []
    for schedule in ("1f1b", "chimera"):
        plan = replace(small_plan(pp=2, schedule="1f1b", microbatches=4, blocks=8))
        plan = replace(plan, layout=replace(plan.layout, schedule=schedule))
        ran = run("train", plan_file(tmp_path, plan), "--local", "2", "--steps", "1", "--json")
        assert ran.code == 0, ran.err
        found.append(json.loads(ran.out)["losses"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_models_without_modules_are_refused_before_anything_starts(run: Run, tmp_path: Path) -> None:
    plan = small_plan(pp=2, microbatches=4, blocks=8, family="bloom")
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "bloom" in ran.err
    assert "possible" in ran.err


def test_emulates_what_was_predicted(run: Run, tmp_path: Path) -> None:
    file = plan_file(tmp_path, small_plan(pp=4, waves=1, microbatches=4, blocks=8, hidden=512, seq_len=512))
    ran = run("train", file, "--local", "4", "--steps", "3", "--emulate", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["losses"] == []
    assert document["emulated"] is True
    assert document["timeline_s"] >= document["predicted"]["step_s"]  # every action waits its time at least


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--local", "torchrun", "try: --local 2"]),
        (["--local", "3"], ["--local", "3: the plan runs on 2 ranks", "possible: 2"]),
        (["--local", "0", "--steps", "-1"], ["--local", "--steps", "must be from 1"]),
        (["--local", "2", "--transport", "memry"], ["--transport", "nearest: memory"]),
        (["--local", "2", "--hang-floor", "nan"], ["--hang-floor", "must be from"]),
        (["--local", "2", "--emulate", "--seed", "3"], ["--seed", "means nothing beside --emulate"]),
    ],
)
def test_bad_options_are_explained(run: Run, tmp_path: Path, options: list[str], words: list[str]) -> None:
    ran = run("train", plan_file(tmp_path, small_plan()), *options)
    assert ran.code == 2
    assert ran.out == ""
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def test_layouts_that_the_runtime_does_not_run_are_refused(run: Run, tmp_path: Path) -> None:
    plan = small_plan(schedule="zb-h1", recompute="selective")
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "recompute" in ran.err
    assert "possible: none, full" in ran.err
    plan = small_plan()
    plan = replace(plan, layout=replace(plan.layout, pp=1, cp=2, schedule="1f1b"), cut=(8,))
    ran = run("train", plan_file(tmp_path, plan), "--local", "2")
    assert ran.code == 2
    assert "layout.cp" in ran.err


def test_full_recomputation_gives_the_same_losses(run: Run, tmp_path: Path) -> None:
    losses = []
    for recompute in ("none", "full"):
        file = plan_file(tmp_path, small_plan(recompute=recompute))
        ran = run("train", file, "--local", "2", "--steps", "3", "--json")
        assert ran.code == 0, ran.err
        losses.append(json.loads(ran.out)["losses"])
    assert losses[0] == losses[1]
