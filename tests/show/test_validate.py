"""What people and machines see of predictions against measurements."""

import json
import math
import re

import pytest
from rich.console import Console

from wavetrain.base.codec import dumps
from wavetrain.show.validate import SCHEMA, card, document
from wavetrain.study.outcome import Outcome
from wavetrain.study.validate import summarize

SET_KEYS = set(
    """name file rows expressible mape median_ape p90_ape bias memory_mape oom_accuracy spearman regret
    scored counts true_fits false_fits true_oom false_oom worst_regret groups unexpressed""".split()
)
ROW_KEYS = set(
    "row_id file line measured_step_s predicted_step_s predicted_peak_bytes fits assumptions".split(),
)


def outcome(i=0, **changes) -> Outcome:
    defaults = {
        "row_id": f"megatron:{i:04}",
        "file": "megatron.csv",
        "line": i + 2,
        "source": "Efficient Parallelization Layouts (WANT@NeurIPS23, arXiv 2311.05610) raw run sheets",
        "device": "a100-sxm-80gb",
        "workload": "w",
        "scored": True,
        "status": "ok",
        "measured_step_s": 10.0 + i,
        "measured_peak_bytes": 6e10,
        "predicted_step_s": 11.0 + i,
        "predicted_peak_bytes": 6.6e10,
        "fits": True,
        "assumptions": ("vocab 51200",),
    }
    return Outcome(**(defaults | changes))


def shown(rows, width=80):
    console = Console(width=width, highlight=False, markup=False, color_system=None)
    with console.capture() as captured:
        console.print(card(summarize(rows)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def test_for_people_in_eighty_columns():
    rows = [outcome(i) for i in range(6)]
    rows += [outcome(i, reason="fp4: no such products", row_id=f"x{i}") for i in range(6, 9)]
    rows += [outcome(10, status="OOM", fits=False, measured_step_s=None, predicted_step_s=1e9)]
    rows += [outcome(11, file="b.csv", scored=False, source="", predicted_step_s=1e9)]
    text = shown(rows)
    assert max(map(len, text.splitlines())) <= 80
    lines = {line.split()[0]: line.split() for line in reversed(text.splitlines()) if line}
    numbers = ["10", "3", "8.2", "8.0", "9.5", "+8.2", "10.0", "100", "1.00", "0.0"]
    assert lines["megatron.csv"][1:] == numbers
    assert re.search(r"^ +3  fp4: no such products +megatron.csv:8 x6$", text, re.MULTILINE)
    assert "b.csv *" in text
    assert "no row of this set counts" in text
    assert ">99999" in text
    assert "largest errors" in text
    assert "b.csv:13 megatron:0011" in text


def test_nothing_to_show():
    assert shown([]) == "no rows"
    text = shown([outcome(reason="fp4")])
    assert "fp4" in text
    assert "largest errors" not in text
    assert "can't be expressed because" not in shown([outcome()])


def test_many_reasons_are_counted():
    text = shown([outcome(i, reason=f"reason {i}") for i in range(30)])
    assert "20  20 more reasons" in text


def test_predictions_that_are_no_numbers_are_counted():
    assert "2 rows have no finite prediction" in shown([outcome(predicted_step_s=math.nan)] * 2 + [outcome()])


def test_names_are_printable():
    text = shown([outcome(file="\x1b[31mred", source="[bold]\u202e", row_id="\x07", reason="\x9b"), outcome()])
    assert not set("\x1b\x07\x9b\u202e") & set(text)
    assert "[bold]" in text


def test_for_machines():
    rows = [outcome(), outcome(1, reason="fp4", fits=None, predicted_step_s=None, predicted_peak_bytes=None)]
    made = json.loads(dumps(document(summarize(rows))))
    assert made["schema"] == SCHEMA == "wavetrain.validation/1"
    assert [item["rows"] for item in made["sets"]] == [2, 2]
    assert all(set(item) >= SET_KEYS for item in made["sets"])
    assert all(set(row) >= ROW_KEYS for row in made["rows"])
    assert [row.get("reason") for row in made["rows"]] == [None, "fp4"]
    assert "reason" not in made["rows"][0]
    assert made["rows"][0]["assumptions"] == ["vocab 51200"]
    assert made["sets"][0]["mape"] == pytest.approx(10)
    reason = {"reason": "fp4", "rows": 1, "examples": ["megatron.csv:3 megatron:0001"]}
    assert made["sets"][0]["unexpressed"] == [reason]


def test_what_json_can_not_hold_is_null():
    odd = {"measured_step_s": math.nan, "measured_peak_bytes": -math.inf, "predicted_peak_bytes": math.nan}
    text = dumps(document(summarize([outcome(**odd, predicted_step_s=math.inf), outcome(predicted_step_s=1.7e308)])))
    row = json.loads(text)["rows"][0]
    assert {row[key] for key in (*odd, "predicted_step_s")} == {None}
    assert dumps(document(summarize([]))) == dumps({"schema": SCHEMA, "sets": [], "rows": []})
