"""docs/claims.md is what the command writes: of two works whole sections, of the third what does not take minutes."""

from dataclasses import replace
from pathlib import Path

import pytest

from wavetrain.show.claims import claims_markdown
from wavetrain.study.claims.hanayo import hanayo_claims
from wavetrain.study.claims.osdp import osdp_claims
from wavetrain.study.claims.series import series_claims
from wavetrain.study.scaling.read import load_study
from wavetrain.study.scaling.run import run_study

PAGE = (Path(__file__).parents[3] / "docs" / "claims.md").read_text(encoding="utf-8")


def sections(page):
    return dict(part.split("\n", 1) for part in page.split("\n## ")[1:])


@pytest.mark.parametrize("claims", [hanayo_claims, osdp_claims])
def test_a_section_is_what_is_simulated(claims):
    made = sections(claims_markdown(claims()))
    made.pop("What was executed", None)
    (title,) = made
    assert sections(PAGE)[title].strip() == made[title].strip()


def test_published_series_are_what_is_simulated():
    rows = [line.rsplit("|", 2)[0] for line in claims_markdown(series_claims()).splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert all(row in PAGE for row in rows)


def test_the_third_work_s_loss_is_what_its_study_finds(tmp_path):
    asked = load_study("weak-scaling")
    ends = replace(asked, devices=(128, 2048), strategies=asked.strategies[:1])
    first, last = run_study(ends, tmp_path).records
    loss = 100 * (last.tokens_per_s_per_device / first.tokens_per_s_per_device - 1)
    power = 100 * (last.power_w_per_device / first.power_w_per_device - 1)
    rows = [line for line in PAGE.splitlines() if line.startswith("| 7B with FSDP on H100")]
    assert f"| {loss:.2f} % |" in rows[0]
    assert f"| {power:.2f} % |" in rows[1]
    assert -45 < loss < -30
    assert -9 < power < -3
