"""The HTML report: complete, inert whatever the names say, and silent on the network."""

import base64
import hashlib
import html
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from wavetrain.base.errors import InputError
from wavetrain.show.page import part
from wavetrain.show.validate_html import report_page
from wavetrain.study.outcome import Outcome
from wavetrain.study.validate import summarize

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "a\u2028b\u2029c",
    "<a href='javascript:alert(1)'>x</a>",
    "]]><!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "%{customdata[0]}<br>&lt;b&gt;",
    "\ud800lone\x00\x1b[31m",
]


def rows(names=("r",)):
    for i, name in enumerate(names):
        for j in range(5):
            yield Outcome(
                row_id=f"{name} {j}",
                file=f"{name}.csv",
                line=j + 2,
                source=name,
                device=f"{name}-sxm",
                workload=name,
                scored=j > 0,
                status="ok" if j < 4 else name,
                measured_step_s=1.0 + j,
                measured_peak_bytes=1e9 * (j + 1),
                predicted_step_s=1.1 + j + i,
                predicted_peak_bytes=1.2e9 * (j + 1),
                fits=True,
                reason=name if j == 3 else "",
            )


class Elements(HTMLParser):
    """The tags, attributes and scripts that a browser would find."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.text = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and self.scripts and not self.scripts[-1][1]:
            self.scripts[-1] = (self.scripts[-1][0], data)
        else:
            self.text.append(data)


def figures(page):
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return {figure["id"]: figure for figure in json.loads(text)}


def own(page):
    """The page without plotly's code, which is not ours to check."""
    from plotly.offline import get_plotlyjs

    return page.replace(get_plotlyjs(), "")


def test_a_page_has_its_pictures_and_tables():
    page = report_page(summarize(rows(["megatron", "nemo"])))
    assert len(page.encode()) < 6_000_000
    found = figures(page)
    assert list(found) == ["time", "distribution", "memory"]
    points = [trace for trace in found["time"]["data"] if trace["mode"] == "markers"]
    assert [trace["x"] for trace in points] == [[1, 2, 3]] * 2
    assert points[0]["customdata"][0] == ["megatron 0", "+10.0 %"]
    assert points[0]["marker"]["symbol"] == ["circle-open", "circle", "circle"]
    assert points[0]["marker"]["color"] != points[1]["marker"]["color"]
    assert sum(found["distribution"]["data"][0]["y"]) == 4
    assert {found["time"]["layout"][axis]["type"] for axis in ("xaxis", "yaxis")} == {"log"}
    assert "megatron.csv" in own(page)
    assert "prefers-color-scheme: dark" in page


def test_the_band_is_ten_percent():
    lower, upper, exact = figures(report_page(summarize(rows())))["time"]["data"][:3]
    assert lower["y"] == pytest.approx([0.9 * x for x in lower["x"]])
    assert upper["y"] == pytest.approx([1.1 * x for x in upper["x"]])
    assert exact["y"] == exact["x"]


def test_plotly_knows_every_property():
    from plotly.graph_objects import Figure

    for figure in figures(report_page(summarize(rows()))).values():
        Figure(data=figure["data"], layout=figure["layout"])


def test_the_policy_allows_the_scripts_of_the_page_and_nothing_else():
    page = report_page(summarize(rows(HOSTILE)))
    elements = Elements(page)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    digests = re.findall(r"'sha256-(.*?)'", policy)
    run = [text for attributes, text in elements.scripts if "type" not in attributes]
    assert [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run] == digests
    assert len(elements.scripts) == 4
    assert "unsafe-eval" not in policy
    assert not re.search(r"script-src[^;]*unsafe", policy)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_inert(name):
    page = own(report_page(summarize(rows([name]))))
    plain = own(report_page(summarize(rows(["plain"]))))
    assert (name in page) == name.startswith("{{")  # which is text in HTML, and was not run as a template
    assert not set("\u2028\u2029\x00\x1b") & set(page)
    page.encode()
    found, expected = Elements(page), Elements(plain)
    assert found.tags == expected.tags
    assert [key for key, _ in found.attributes] == [key for key, _ in expected.attributes]
    assert not [key for key, _ in found.attributes if key.startswith("on") or key in {"href", "src"}]
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029") & set(data)


@pytest.mark.parametrize("name", HOSTILE)
def test_labels_have_no_markup_for_plotly(name):
    for figure in figures(report_page(summarize(rows([name])))).values():
        for trace in figure["data"]:
            labels = [trace.get("name", ""), *(item[0] for item in trace.get("customdata", ()))]
            assert not [label for label in labels if set("<>") & set(label)]
            assert not [label for label in labels if re.search(r"&(?!(lt|gt|amp);)", label)]


def test_no_button_sends_anything_away():
    assert "modeBarButtons" in part("draw.js")
    assert "sendChartToCloud" not in part("draw.js")
    assert "https:" not in own(report_page(summarize(rows())))


def test_nothing_to_draw():
    page = report_page(summarize([]))
    assert figures(page) == {}
    assert "no rows" in page
    unexpressed = [row for row in rows() if row.reason]
    assert figures(report_page(summarize(unexpressed))) == {}


def test_extreme_numbers_are_drawn():
    changes = [(5e-324, 5e-324), (1.7e308, 1.7e308), (1.0, 0.0), (1.0, float("nan")), (1.0, -1.0)]
    made = [Outcome(**{**vars(row), "measured_step_s": m, "predicted_step_s": p, "reason": "", "status": "ok"})
            for row, (m, p) in zip(rows(), changes, strict=True)]  # fmt: skip
    points = figures(report_page(summarize(made)))["time"]["data"][3]
    assert points["x"] == [5e-324, 1.7e308]


def test_many_rows_are_thinned_and_it_is_said():
    some = next(iter(rows()))
    many = [Outcome(**{**vars(some), "row_id": "x" * 60, "source": f"s{i % 300}", "line": i}) for i in range(20_000)]
    page = report_page(summarize(many))
    assert len(page.encode()) < 6_000_000
    assert "4,000 of 20,000 rows are drawn" in page
    assert "101 more sets are not listed" in page
    traces = figures(page)["time"]["data"][3:]
    assert len(traces) == 41
    assert traces[-1]["name"] == "all other sets"


@pytest.mark.parametrize("missing", ["plotly.offline", "jinja2"])
def test_a_missing_library_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"pip install 'wavetrain\[report\]'") as caught:
        report_page(summarize(rows()))
    assert missing.partition(".")[0] in str(caught.value)
