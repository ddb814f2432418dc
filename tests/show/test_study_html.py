"""The page of a study: complete, inert whatever names say, silent on the network, and within reach of a keyboard."""

import base64
import hashlib
import html
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.show.browser import Browser, needs_browser
from tests.show.studies import SCALES, record, records, study, timeline, unfitting

from wavetrain.base.errors import InputError
from wavetrain.show.page import part, plotly_script
from wavetrain.show.study_html import MOST_POINTS, study_page
from wavetrain.study.scaling.spec import Published, Strategy

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=http://evil.example/x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "</style></title>a\u2028b\u2029c",
    "\u202egnp.exe\u200f{{ 7 * 7 }}{% raw %}",
    "%{customdata[0]}<br>&lt;b&gt;<a href='javascript:alert(1)'>x</a>",
    "\ud800lone\x00\x1b[31m]]><!--",
)
SAID = ("fsdp loses 61 % per device.", "tp 2 overtakes fsdp at about 26 devices.")


def hostile():
    """A study in which every word that comes from outside is an attack."""
    names = HOSTILE[:3]
    asked = study(
        name=HOSTILE[0],
        title=" ".join(HOSTILE),
        strategies=tuple(Strategy(name) for name in names),
        published=tuple(Published(name, name, "tokens_per_s", ((8, 1e5), (64, 6e5))) for name in HOSTILE),
    )
    found = []
    for model, node in ((HOSTILE[1], HOSTILE[2]), (HOSTILE[3], HOSTILE[4])):
        for made in records(names=names, scales=SCALES[:4], model=model, node=node):
            attack = dict.fromkeys(HOSTILE, 0.1)
            words = {"why": HOSTILE[1], "plan": HOSTILE[0], "bound_by": HOSTILE[5], "batch": HOSTILE[4]}
            if made.fits:
                words |= {
                    "terms": {**made.terms, **attack},
                    "memory": {**made.memory, **dict.fromkeys(HOSTILE, 1000000000.0)},
                }
                words |= {"elasticity": {**made.elasticity, **attack}, "what_if": {**made.what_if, **attack}}
            found.append(replace(made, **words))
    return study_page(asked, found, findings=HOSTILE, timelines={HOSTILE[1]: timeline()})


class Reader(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.text = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and not self.scripts[-1][1]:
            self.scripts[-1][1] = data
        else:
            self.text.append(data)


def own(page):
    """The page without plotly's code, which is not ours to check."""
    return page.replace(plotly_script(), "")


@pytest.fixture(scope="module")
def page():
    return study_page(study(), records(), findings=SAID, timelines={"tp 2 at 2,048": timeline()})


@pytest.fixture(scope="module")
def several():
    found = [*records(), *records(model="llama2-70b", base=0.1, scales=SCALES[2:])]
    return study_page(study(models=("llama2-7b", "llama2-70b")), found, findings=SAID)


def test_all_is_on_the_page(page):
    reader = Reader(own(page))
    said = " ".join(reader.text)
    for words in (
        "Weak scaling of a 7B model",
        "Findings",
        *SAID,
        "Where a step goes",
        "Strategies by scale",
        "Memory",
    ):
        assert words in said
    for words in (
        "From the peak to what is achieved",
        "What would help",
        "All points",
        "One step of a pipeline",
        "rank 3",
    ):
        assert words in said
    assert "arXiv 2411.13055" in said
    assert "does not fit: the plan that comes nearest needs 112 GiB of 80 GiB" in said
    drawn = {figure["id"] for figure in json.loads(reader.scripts[0][1])}
    assert {"throughput-1", "marginal-1", "bottlenecks-1", "memory-1", "waterfall-8-1", "waterfall-2048-1"} <= drawn
    assert reader.tags.count("details") == len(drawn)
    assert reader.tags.count("figure") == len(drawn) + 2  # and a map, and a timeline
    rows = [value for tag, name, value in reader.attributes if tag == "tr" and name == "id"]
    assert len(rows) == len(set(rows)) == len(records())


def test_every_id_is_one(several):
    ids = [value for _, name, value in Reader(own(several)).attributes if name == "id"]
    assert len(ids) == len(set(ids))
    hashes = [value[1:] for tag, name, value in Reader(own(several)).attributes if (tag, name) == ("a", "href")]
    assert hashes
    assert set(hashes) <= set(ids)


def test_every_figure_and_table_says_what_it_is(page):
    reader = Reader(own(page))
    for tag in ("main", "header", "footer", "nav", "h1"):
        assert reader.tags.count(tag) == 1, tag
    labelled = {value for _, name, value in reader.attributes if name == "aria-labelledby"}
    assert labelled <= {value for _, name, value in reader.attributes if name == "id"}
    headers = [value for tag, name, value in reader.attributes if tag == "th" and name == "scope"]
    assert len(headers) == reader.tags.count("th")


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else():
    text = hostile()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', text)[1])
    digests = re.findall(r"'sha256-(.*?)'", policy)
    run = [script for attributes, script in Reader(text).scripts if "type" not in attributes]
    assert [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run] == digests
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not re.search(r"script-src[^;]*unsafe", policy)
    assert len(digests) == 3


def test_hostile_names_are_text(several):
    text = own(hostile())
    reader, usual = Reader(text), Reader(own(several))
    assert set(reader.tags) - {"g", "line", "svg", "rect", "text", "title"} <= set(usual.tags)
    allowed = {(tag, name) for tag, name, _ in usual.attributes}
    for tag, name, value in reader.attributes:
        assert not name.startswith("on"), (tag, name)
        assert (tag, name) in allowed or tag in ("svg", "rect", "line", "text"), (tag, name)
        assert name != "href" or re.fullmatch(r"#[\w-]+", value)
    assert not set("\u2028\u2029\u202e\u200f\x00\x1b") & set(text)
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert not set("<>&") & set(data)
    text.encode()


def test_labels_have_no_markup_for_plotly():
    for figure in json.loads(Reader(own(hostile())).scripts[0][1]):
        layout = figure["layout"]
        labels = [trace.get("name", "") for trace in figure["data"]]
        for trace in figure["data"]:
            labels += [x for key in ("x", "y", "text", "customdata") for x in trace.get(key, ()) if isinstance(x, str)]
        labels += [text for axis in ("xaxis", "yaxis") for text in layout[axis].get("ticktext", ())]
        assert not [label for label in labels if set("<>") & set(label)]
        assert not [label for label in labels if re.search(r"&(?!(lt|gt|amp);)", label)]


def test_a_large_study_stays_small_and_says_what_is_left_out():
    name = "a strategy with quite a long name that goes on, number {}"
    many = [
        record(name.format(i), devices, model=f"m{model}")
        for model in range(6)
        for i in range(12)
        for devices in SCALES
    ]
    text = study_page(study(), many)
    assert len(text.encode()) < 6_000_000
    assert f"{len(many) - 3 * 12 * len(SCALES)} of all points are not on this page" in text
    one = [record(name.format(i), devices) for i in range(200) for devices in SCALES]
    text = study_page(study(), one)
    assert len(text.encode()) < 6_000_000
    kept = MOST_POINTS // len(SCALES) * len(SCALES)
    assert f"{len(one) - kept} of all points are not on this page" in text


@pytest.mark.parametrize("found", [[], [unfitting("fsdp", 8)], [record()]])
def test_little_or_nothing_to_show(found):
    text = study_page(study(tokens=None, failures=None, published=()), found)
    assert "All numbers are predictions." in text
    assert ("All points" in own(text)) == bool(found)


def test_columns_without_a_number_are_left_out(page):
    bare = [replace(each, train_s=None, train_usd=None, train_mwh=None, goodput_share=None) for each in records()]
    for text, there in ((page, True), (study_page(study(), bare), False)):
        headers = re.findall(r'<th scope="col">([^<]*)</th>', own(text).partition('id="records-1"')[2])
        assert {"tokens/s", "MFU", "W/device", "kW", "bound by"} <= set(headers)
        assert all((name in headers) == there for name in ("goodput", "time", "cost", "MWh"))


def test_no_button_sends_anything_away(page):
    assert "modeBarButtons" in part("draw.js")
    assert "sendChartToCloud" not in part("draw.js")
    assert "https:" not in own(page)


@pytest.mark.parametrize("missing", ["plotly.offline", "jinja2"])
def test_a_missing_library_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"pip install 'wavetrain\[report\]'") as caught:
        study_page(study(), records())
    assert missing.partition(".")[0] in str(caught.value)


# --- in a browser ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


def opened(browser, folder, text, **how):
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    browser.open(path, **how)
    drawn(browser)


def drawn(browser):
    browser.wait(lambda: browser.evaluate("document.body.dataset.drawn") == "yes")


@needs_browser
@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(15, 20, 25)")])
def test_a_browser_draws_it_without_a_word_or_a_request(browser, tmp_path, scheme, paper):
    opened(browser, tmp_path, hostile(), scheme=scheme, width=400 if scheme == "dark" else 1200)
    browser.shot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    undrawn = "[...document.querySelectorAll('.group:not([hidden]) .plot')].filter(p => !p.querySelector('svg')).length"
    assert browser.evaluate(undrawn) == 0
    written = "document.querySelector('.plot .xtick text').style.fill"
    assert browser.evaluate(written) == ("rgb(31, 35, 40)" if scheme == "light" else "rgb(230, 237, 243)")
    assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.evaluate("document.querySelectorAll('img, .plot a, iframe').length") == 0
    assert browser.said == []
    assert browser.asked == [(tmp_path / "page.html").as_uri()]


@pytest.fixture(scope="module")
def reading(browser, several, tmp_path_factory):
    opened(browser, tmp_path_factory.mktemp("several"), several)
    return browser


@needs_browser
def test_a_legend_hides_a_strategy_in_all_figures_of_its_section(reading):
    lines = """['throughput', 'mfu', 'usd-per-million-tokens'].map(name => document.getElementById(`plot-${name}-1`)
        .data.filter(trace => trace.meta === 'fsdp' && trace.visible !== false).length)"""
    before = reading.evaluate(lines)
    assert all(before)
    buttons = "[...document.querySelectorAll('#throughput-1 .legend button')]"
    reading.evaluate(f"{buttons}.find(button => button.textContent === 'fsdp').focus()")
    reading.press("Enter")
    drawn(reading)
    assert reading.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert reading.evaluate(lines) == [0, 0, before[2]]


@needs_browser
def test_a_keyboard_reaches_cells_legends_and_groups(reading):
    focus = "document.activeElement"
    reading.evaluate("document.querySelector('.skip').focus()")
    seen = []
    while len(seen) < 200 and not any("point" in place for place in seen):
        reading.press("Tab")
        seen.append(reading.evaluate(f"{focus}.tagName + ' ' + ({focus}.dataset.point || {focus}.id)"))
    assert {"SELECT chooser", "SUMMARY ", "BUTTON "} <= set(seen)  # a button without a point is of a legend
    assert reading.evaluate(f"getComputedStyle({focus}).outlineStyle") == "solid"
    reading.press("Home", "ArrowDown", "ArrowDown")
    assert reading.evaluate(f"{focus}.getAttribute('aria-label')") == "ddp, 8 devices: does not fit"
    panel = "document.getElementById('panel-strategies-1').textContent"
    assert "112 GiB" not in reading.evaluate(panel)
    reading.press("Enter")
    assert "needs 112 GiB of 80 GiB" in reading.evaluate(panel)
    reading.press("ArrowRight", " ")
    assert "ddp over 16 devices" in reading.evaluate(panel)
    assert reading.evaluate("document.querySelectorAll('#group-1 .map button[tabindex=\"0\"]').length") == 1
    reading.evaluate("document.getElementById('chooser').focus()")
    reading.press("ArrowDown")
    drawn(reading)
    assert reading.evaluate("[...document.querySelectorAll('.group')].map(group => group.hidden)") == [True, False]
    assert reading.evaluate("document.querySelector('#plot-throughput-2 svg') !== null")
    assert reading.evaluate("document.querySelector('.bar a').hash") == "#throughput-2"
    assert reading.said == []


@needs_browser
def test_print_is_light_and_as_wide_as_paper(reading, tmp_path):
    reading.resize(718, 900)
    reading.media(scheme="dark")
    reading.wait(lambda: reading.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 20, 25)")
    drawn(reading)
    written = "document.querySelector('.plot .xtick text').style.fill"
    assert reading.evaluate(written) == "rgb(230, 237, 243)"
    reading.media(scheme="dark", kind="print")
    reading.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert reading.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert reading.evaluate(written) == "rgb(31, 35, 40)"
    ends = """[...document.querySelectorAll('.plot svg, .map, .records table, figure, .bars')]
        .map(element => element.getBoundingClientRect().right)"""
    assert max(reading.evaluate(ends)) <= 718
    reading.printed(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert reading.said == []
