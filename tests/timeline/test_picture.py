"""Two timelines in one picture."""

import re
from xml.etree import ElementTree

from wavetrain.timeline.picture import svg
from wavetrain.timeline.timeline import Event, Timeline

FIRST = Timeline((Event(0.0, 1.0, 0, "compute", "0F0"), Event(1.0, 3.0, 0, "compute", "0B0")))
SECOND = Timeline((Event(5.0, 6.5, 0, "compute", "0F0"), Event(6.5, 9.0, 1, "compute", "1W12")))


def test_both_are_there_on_one_scale_from_their_own_starts() -> None:
    text = svg(FIRST, SECOND, names=("predicted", "measured"), title="a <b> & c")
    tree = ElementTree.fromstring(text)
    titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["a <b> & c", "0F0 1000.00 ms", "0B0 2000.00 ms", "0F0 1500.00 ms", "1W12 2500.00 ms"]
    bars = [float(width) for width in re.findall(r'y="\d+" width="([\d.]+)" height="16" fill="#[0-9A-F]', text)]
    assert bars[1] == 2 * bars[0]
    assert bars[2] == 1.5 * bars[0]
    assert "predicted 3000.0 ms, measured 4000.0 ms" in text


def test_only_what_computes_is_drawn_and_nothing_is_fine() -> None:
    send = Timeline((Event(0.0, 1.0, 0, "send to 1", "0SEND_F0"),))
    assert "SEND" not in svg(send, Timeline(), names=("a", "b"), title="t")
    assert "</svg>" in svg(Timeline(), Timeline(), names=("a", "b"), title="t")
