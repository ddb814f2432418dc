"""The page of a comparison: complete, small, inert whatever names say, and silent on the network."""

import base64
import hashlib
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from random import Random

import pytest
from tests.runtime.plans import small_model, small_plan
from tests.show.browser import Browser, needs_browser
from tests.study.runs import run_of

from wavetrain.base.errors import InputError
from wavetrain.cluster import load_cluster
from wavetrain.plan import Request, plan_of
from wavetrain.show.compare_html import MOST_EVENTS, page, timelines_picture
from wavetrain.sim.breakdown import TERMS
from wavetrain.sim.predict import simulate
from wavetrain.study.compare import Pair, compare
from wavetrain.study.refit import refit
from wavetrain.timeline import Timeline

HOSTILE = [
    "</style></title><script>alert(1)</script>",
    "<img src=http://evil.example/x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "]]><!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "\x00\x1b[31mred",
]


def compared(plan, *, stretched=lambda _: 1.0, **over):
    prediction = simulate(plan)
    events = tuple(
        replace(event, end_s=event.start_s + event.duration_s * stretched(number))
        for number, event in enumerate(prediction.timeline.events)
    )
    return compare(plan, prediction, run_of(plan, prediction, timeline=Timeline(events), **over))


@pytest.fixture(scope="module")
def comparison():
    return compared(small_plan(pp=2, schedule="1f1b", microbatches=4))


@pytest.fixture(scope="module")
def large():
    model = small_model(blocks=32, hidden=256, heads=8, vocab=512, seq_len=128)
    cluster = load_cluster("dgx-a100:2")
    plan = plan_of(Request(model=model, cluster=cluster, global_batch=32, pp=16, dp=1, schedule="zb-h1"))
    random = Random(1)
    return compared(plan, stretched=lambda _: random.uniform(0.5, 1.0))


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader


def test_all_is_on_the_page(comparison):
    plan = small_plan(pp=2, schedule="1f1b", microbatches=4)
    reader = read(page(comparison, refit(plan, comparison)))
    said = " ".join(reader.text)
    for heading in ("Step", "Terms", "Timelines", "Memory", "Numbers", "Environment"):
        assert heading in reader.text
    for pair in comparison.terms:
        assert pair.name in reader.text
        assert TERMS[pair.name] in said
    for words in ("rank 0", "rank 1", "predicted", "measured", *comparison.sentences):
        assert words in reader.text
    assert reader.tags.count("rect") > 2 * 2 * 8


def test_nothing_runs_and_nothing_is_fetched(comparison):
    text = page(comparison)
    reader = read(text)
    assert {"script", "iframe", "img", "link", "object", "a", "form"}.isdisjoint(reader.tags)
    for tag, name, value in reader.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("style", "src", "href"), (tag, name)
        assert "url(" not in value
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert set(re.findall(r"url\((.)(.)", style)) == {('"', "#")}
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(value for tag, _, value in reader.attributes if tag == "meta" and value.startswith("default-src"))
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def hostile(comparison):
    names = {name: name for name in HOSTILE}
    return replace(comparison, model=HOSTILE[0], cluster=HOSTILE[1], environment=names, sentences=tuple(HOSTILE))


def test_hostile_names_are_text(comparison):
    usual, reader = read(page(comparison)), read(page(hostile(comparison)))
    assert set(reader.tags) == set(usual.tags)
    assert {(tag, name) for tag, name, _ in reader.attributes} == {(tag, name) for tag, name, _ in usual.attributes}
    said = "".join(reader.text)
    assert "<script>alert(1)</script>" in said
    assert "{{ 7 * 7 }}" in said


def test_events_that_differ_are_marked():
    plan = small_plan(pp=2, schedule="1f1b", microbatches=4)
    exact = timelines_picture(compared(plan))
    assert not any("er" in bar.style for row in exact.rows for bar in row.bars)
    for factor, mark in ((1.2, "longer"), (0.8, "shorter")):
        marked = timelines_picture(compared(plan, stretched=lambda _, factor=factor: factor))
        for row in marked.rows:
            assert row.bars
            assert all((mark in bar.style) == (row.side == "measured") for bar in row.bars)
    near = timelines_picture(compared(plan, stretched=lambda _: 1.05))
    assert not any("er" in bar.style for row in near.rows for bar in row.bars)


def test_both_timelines_have_one_scale():
    slower = compared(small_plan(pp=2, schedule="1f1b", microbatches=4), stretched=lambda _: 0.5)
    rows = timelines_picture(slower).rows
    for predicted, measured in zip(rows[::2], rows[1::2], strict=True):
        for first, second in zip(predicted.bars, measured.bars, strict=True):
            assert second.x == pytest.approx(first.x)
            assert second.width == pytest.approx(first.width / 2)


def test_sixteen_ranks_are_small(large):
    text = page(large)
    assert len(text.encode()) < 500_000
    assert "16 ranks are drawn" not in text
    assert text.count("<title>") > 16 * 32 * 3 * 2


def test_what_is_too_much_is_not_drawn_and_said():
    plan = small_plan(pp=4, schedule="1f1b", microbatches=MOST_EVENTS // 8)
    picture = timelines_picture(compared(plan))
    assert picture.note == "2 of 4 ranks are drawn."
    assert sum(len(row.bars) for row in picture.rows) <= MOST_EVENTS


def test_without_jinja_the_remedy_is_said(comparison, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"wavetrain\[report\]"):
        page(comparison)


def test_memory_that_was_predicted_but_never_held_is_drawn(comparison):
    """0 is a measurement, and none is not."""
    rows = (Pair("gathered", 1000.0, 0.0), Pair("working", 1000.0, None), Pair("parameters", 1000.0, 1000.0))
    said = page(replace(comparison, memory=rows))
    assert "gathered, measured: 0 B" in said
    assert "parameters, measured: 1000 B" in said
    assert "working, measured" not in said


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@needs_browser
@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(15, 20, 25)")])
def test_a_browser_shows_it_without_a_word_or_a_request(browser, large, tmp_path, scheme, paper):
    path = tmp_path / "page.html"
    path.write_text(page(hostile(large)), encoding="utf-8", errors="replace")
    browser.open(path, height=1600, scheme=scheme)
    browser.shot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    assert browser.said == []
    assert browser.asked == [path.as_uri()]
