"""A study on the terminal and in files."""

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.study.scaling.made import FAILURES, record, study

from wavetrain.show.study import records_csv, study_card, study_document, study_markdown
from wavetrain.study.scaling.run import Done

HOSTILE = "=cmd|'<img src=x onerror=alert(1)>'[x](javascript:1) \u202e"


def made(strategy, rates, **more):
    rows = []
    for devices, rate in rates.items():
        seen = {"mfu": 0.4, "usd_per_million_tokens": 0.1, "bound_by": "sharding", "terms": {"compute": 1.0}}
        rows.append(record(devices, rate, watts=600, good=0.9, strategy=strategy, **(seen if rate else {}), **more))
    return rows


@pytest.fixture
def done():
    fsdp = made("fsdp", {8: 800.0, 16: 1500.0, 32: 2000.0, 64: None})
    other = made("tp 2", {8: None, 16: 1400.0, 32: 2600.0, 64: None})
    return Done((*fsdp, *other), 8, 0, 1.0)


def printed(done, asked):
    console = Console(width=80, highlight=False, markup=False, file=io.StringIO())
    console.print(study_card(asked, done, []))
    return console.file.getvalue()


def test_the_card_has_the_best_at_each_scale_and_who_overtakes(done):
    text = printed(done, study(failures=FAILURES))
    rows = [line.split() for line in text.splitlines() if line[:7].strip().isdigit()]
    assert [row[:2] for row in rows if row[0] in ("8", "16", "32")] == [["8", "fsdp"], ["16", "fsdp"], ["32", "tp"]]
    assert "nothing" in text
    assert "tp 2 is better than fsdp from about 18 devices on (computed at 16 and 32)" in text
    assert "88%" in text  # of the step from 8 to 16: 8 further devices give 700 tokens/s, the first 8 gave 800


def test_the_document_is_json_and_complete(done):
    found = json.loads(json.dumps(study_document(study(failures=FAILURES), done), allow_nan=False))
    assert found["schema"] == "wavetrain.study/1"
    assert len(found["records"]) == 8
    assert [one["devices"] for one in found["best"]] == [8, 16, 32]
    assert found["crossovers"][-1]["second"] == "tp 2"
    (knee,) = found["knees"]  # 8 devices give 800 tokens/s, the step from 16 to 32 gives 31 of these 100 each
    assert (knee["strategy"], knee["stop_below"], knee["before"], knee["after"]) == ("fsdp", 0.5, 16, 32)
    assert 8 < knee["devices"] < 32


def test_of_energy_the_best_is_the_same_everywhere():
    fast = made("fast", {8: 800.0, 16: 1600.0}, objective="energy")
    slow = [replace(one, strategy="slow", tokens_per_s=400.0, tokens_per_joule=9.0) for one in fast]
    done, asked = Done((*fast, *slow), 4, 0, 1.0), study(failures=FAILURES)
    document, text = study_document(asked, done), printed(done, asked)
    assert [one["strategy"] for one in document["best"]] == ["slow", "slow"]
    assert any("slow gives most tokens per joule" in said for said in document["findings"])
    rows = [line.split()[:2] for line in text.splitlines() if line[:7].strip().isdigit()]
    assert rows == [["8", "slow"], ["16", "slow"]]
    assert "is better than" not in text


def test_a_table_has_the_same_columns_in_every_line(done):
    rows = list(csv.DictReader(io.StringIO(records_csv(done.records))))
    assert len(rows) == 8
    assert rows[0]["terms.compute"] == "1.0"
    assert rows[3]["fits"] == "false"
    assert rows[3]["tokens_per_s"] == rows[3]["terms.compute"] == ""
    assert all(set(row) == set(rows[0]) for row in rows)


def test_names_are_text_everywhere():
    rows = made(HOSTILE, {8: 800.0, 16: 1000.0}, model=HOSTILE)
    done, asked = Done(tuple(rows), 2, 0, 1.0), study(title=HOSTILE, failures=FAILURES)
    assert "\u202e" not in printed(done, asked)
    text = study_markdown(asked, done)
    assert "<img" not in text.replace("\\<", "")
    assert "](" not in text.replace("\\]", "")
    cell = next(csv.DictReader(io.StringIO(records_csv(rows))))["strategy"]
    assert cell == f"'{HOSTILE}"  # a spreadsheet sees text, not a formula
