"""Figures of a study: what they draw is what the records say."""

import math
from dataclasses import replace

import pytest
from tests.show.studies import SCALES, record, records, study, timeline, unfitting

from wavetrain.show.page import part
from wavetrain.show.study_bars import BELOW_PEAK, KIND_COLOURS, TERM_COLOURS, ink_on, losses
from wavetrain.show.study_figures import figures
from wavetrain.show.study_groups import chosen, groups_of, words_of
from wavetrain.show.study_lines import log_axis
from wavetrain.show.study_maps import degrees_map, strategy_map
from wavetrain.show.study_steps import COLOURS as STEP_COLOURS
from wavetrain.show.study_steps import step_figures
from wavetrain.sim.breakdown import TERMS
from wavetrain.study.scaling.returns import knee, marginal, setting_of
from wavetrain.study.scaling.spec import Published, Strategy


def found(asked=None, given=None):
    return {figure.id: figure for figure in figures(asked or study(), given or records())}


def traces(figure, name, mode="lines+markers"):
    return [trace for trace in figure.data if trace.get("meta") == name and trace.get("mode") == mode]


def group(given=None, asked=None):
    return groups_of(asked or study(), given or records())[0]


def test_throughput_ideal_failures_and_published():
    figure = found()["throughput-1"]
    own = [each for each in records() if each.strategy == "fsdp"]
    (line,), (dashed,) = traces(figure, "fsdp"), traces(figure, "fsdp", "lines")
    assert line["x"] == list(SCALES)
    assert line["y"] == pytest.approx([each.tokens_per_s for each in own], rel=1e-5)
    assert dashed["line"]["dash"] == "dash"
    assert dashed["y"] == pytest.approx([each.goodput_tokens_per_s for each in own], rel=1e-5)
    (ideal,) = traces(figure, "ideal", "lines")
    assert ideal["y"][1] / ideal["y"][0] == pytest.approx(2048 / 8, rel=1e-5)
    assert ideal["y"][0] == pytest.approx(
        max(each.tokens_per_s for each in records() if each.devices == 8 and each.fits), rel=1e-5
    )
    (theirs,) = traces(figure, "FSDP 7B (published)")
    assert theirs["y"] == pytest.approx([128 * 9500, 2048 * 5960], rel=1e-5)  # stated per device
    assert traces(figure, "ddp")[0]["x"] == [16, 32]
    assert {figure.layout[axis]["type"] for axis in ("xaxis", "yaxis")} == {"log"}
    assert figure.rows[0][0] == "8"
    assert figure.rows[0][3] == "does not fit"
    assert "with failures" in figure.rows[-1][1]


def test_a_ring_and_a_cross_are_where_devices_cease_to_pay():
    line = next(each for each in group().series if each.strategy == "fsdp")
    where = knee(line, 0.5)
    (ring,) = traces(found()["throughput-1"], "fsdp", "markers")
    assert ring["x"] == [where.before]
    figure = found()["marginal-1"]
    (cross,) = traces(figure, "fsdp", "markers")
    assert cross["x"] == [pytest.approx(where.devices, rel=1e-4)]
    assert cross["y"] == [50]
    assert figure.layout["shapes"][0]["y0"] == 50
    (drawn,) = traces(figure, "fsdp")
    assert drawn["y"] == pytest.approx([100 * step.share for step in marginal(line)], rel=1e-5)
    assert drawn["x"] == pytest.approx([math.sqrt(step.before * step.after) for step in marginal(line)], rel=1e-5)
    assert not traces(figure, "tp 2", "markers")  # it pays throughout
    assert found(study(stop_below=0.7))["marginal-1"].layout["annotations"][0]["text"] == "stop below 70 %"


def test_returns_per_watt_and_dollar_are_drawn():
    line = next(each for each in group().series if each.strategy == "tp 2")
    for name, share in (("marginal-watt-1", "joule_share"), ("marginal-dollar-1", "usd_share")):
        (drawn,) = traces(found()[name], "tp 2")
        assert drawn["y"] == pytest.approx([100 * getattr(step, share) for step in marginal(line)], rel=1e-5)


def test_bands_are_of_the_best_strategy_and_sum_to_the_step():
    figure = found()["bottlenecks-1"]
    bands = [trace for trace in figure.data if trace["type"] == "bar" and "yaxis" not in trace]
    assert [sum(column) for column in zip(*(trace["y"] for trace in bands), strict=True)] == pytest.approx([100] * 9)
    assert {trace["meta"]: trace["marker"]["color"] for trace in bands}.items() <= TERM_COLOURS.items()
    best, bound = (trace for trace in figure.data if trace.get("yaxis") == "y2")
    assert best["text"] == ["fsdp", "fsdp"] + ["tp 2"] * 7
    assert bound["text"] == [each.bound_by for each in group().best]
    assert [row[1] for row in figure.rows] == best["text"]


def test_terms_and_kinds_have_colours_of_their_own():
    assert set(TERM_COLOURS) == set(TERMS)
    for colours in (TERM_COLOURS, KIND_COLOURS):
        assert len(set(colours.values())) == len(colours)
    assert [ink_on(colour) for colour in ("#0B4A86", "#F1F4F8")] == ["#FFFFFF", "#111418"]


def test_losses_lead_from_the_peak_to_the_mfu():
    for made in (record("tp 2", 512), record("pp 2", 8), replace(record(), terms={"compute": 1.0, "new": 0.5})):
        lost = dict(losses(made))
        assert sum(lost.values()) == pytest.approx(1 - made.mfu)
        assert lost[BELOW_PEAK] == pytest.approx(made.terms["compute"] / sum(made.terms.values()) - made.mfu)
    figure = found()["waterfall-2048-1"]
    (bars,) = figure.data
    for before, size, base in zip(bars["base"][:-1], bars["x"][1:-1], bars["base"][1:-1], strict=False):
        top = before or 100  # the first bar stands on the ground
        assert base + size == pytest.approx(top, abs=1e-3)
    assert bars["x"][-1] == pytest.approx(100 * group().best[-1].mfu, rel=1e-5)
    assert sum(name.startswith("waterfall") for name in found()) == 3


def test_memory_stands_under_its_capacity():
    figure = found()["memory-1"]
    total = [sum(column) for column in zip(*(trace["y"] for trace in figure.data), strict=True)]
    assert total == pytest.approx([56 + 40 / devices for devices in SCALES], rel=1e-4)  # with what must stay free
    assert figure.layout["shapes"][0]["y0"] == 80
    assert figure.layout["yaxis"]["range"][1] > 80
    by_strategy = found()["memory-strategies-1"]
    assert by_strategy.data[0]["x"] == by_strategy.layout["xaxis"]["tickvals"] == [0, 1]
    assert by_strategy.layout["xaxis"]["ticktext"] == ["fsdp", "tp 2"]


def test_long_names_that_begin_alike_have_bars_of_their_own():
    names = tuple(f"a long name of a strategy that ends in {end}" for end in "abc")
    asked = study(strategies=tuple(map(Strategy, names)))
    figure = found(asked, [record(name, 8) for name in names])["memory-strategies-1"]
    assert all(len(set(trace["x"])) == 3 for trace in figure.data)


def test_less_latency_is_better_hardware():
    figure = found()["elasticity-1"]
    for trace in figure.data:
        assert all(value >= 0 for value in trace["y"])
    (latency,) = (trace for trace in figure.data if trace["meta"] == "network latency")
    assert latency["y"][-1] == pytest.approx(-group().best[-1].elasticity["network_latency"], rel=1e-4)
    (faster,) = traces(found()["what-if-1"], "peak x2")
    assert faster["y"] == pytest.approx([70] * 9)


def test_a_map_says_what_is_best_and_what_does_not_fit():
    shown = strategy_map(group())
    fsdp, tensor, ddp = shown.cells
    assert [cell.state for cell in ddp[:2]] == ["out", "h9"]
    assert ddp[0].spoken == "ddp, 8 devices: does not fit"
    assert fsdp[0].state == "h9 best"
    assert tensor[-1].state == "h9 best"
    ratio = group().at("fsdp", 2048).tokens_per_s / group().at("tp 2", 2048).tokens_per_s
    assert fsdp[-1].share == pytest.approx(ratio)
    assert fsdp[-1].text == f"{100 * ratio:.0f}"
    figure = found()["map-strategies-1"]
    assert figure.data[2]["marker"]["pattern"]["shape"] == ["/", "", ""] + ["/"] * 6
    missing = [each for each in records() if (each.strategy, each.devices) != ("tp 2", 64)]
    assert strategy_map(group(missing)).cells[1][3].state == "none"


def test_maps_divide_by_what_the_objective_wants():
    pins = [(tp, pp) for tp in (1, 2) for pp in (1, 2)]
    asked = study(strategies=tuple(Strategy(f"{tp}x{pp}", pins={"tp": tp, "pp": pp}) for tp, pp in pins))
    rates = {"1x1": (9e4, 1.0), "1x2": (1e4, 4.0), "2x1": (2e4, 2.0), "2x2": (3e4, 3.0)}
    made = [
        replace(record(name, 8), objective="energy", tokens_per_s=rate, tokens_per_joule=per_joule)
        for name, (rate, per_joule) in rates.items()
    ]
    shown, degrees = strategy_map(group(made, asked)), degrees_map(asked, group(made, asked))
    assert [row[0].share for row in shown.cells] == [0.25, 1.0, 0.5, 0.75]
    assert [[cell.share for cell in row] for row in degrees.cells] == [[0.25, 1.0], [0.5, 0.75]]
    assert shown.note.startswith("Tokens per joule")
    assert strategy_map(group()).note.startswith("Throughput")


def test_degrees_have_a_map_where_both_are_pinned():
    pins = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
    asked = study(strategies=tuple(Strategy(f"{tp}x{pp}", pins={"tp": tp, "pp": pp}) for tp, pp in pins[:-1]))
    made = [record(f"{tp}x{pp}", 64, base=tp + pp) for tp, pp in pins[:-2]] + [unfitting("4x1", 64), record("2x2", 8)]
    shown = degrees_map(asked, group(made, asked))
    assert shown.row_names == ("TP 1", "TP 2", "TP 4")
    assert shown.column_names == ("PP 1", "PP 2")
    assert [[cell.text for cell in row] for row in shown.cells][2] == ["-", ""]
    assert shown.cells[1][1].share == 1
    assert "64 devices" in shown.title
    assert degrees_map(study(), group()) is None
    few = study(strategies=tuple(Strategy(f"{n}", pins={"tp": n, "pp": n}) for n in (1, 2, 4)))
    assert degrees_map(few, group([record(f"{n}", 8) for n in (1, 2, 4)], few)) is None


def test_groups_are_told_apart_and_compared():
    given = [*records(), *records(model="llama2-70b", base=0.1, scales=SCALES[3:])]
    figures_found = found(None, given)
    assert "throughput-2" in figures_found
    assert figures_found["throughput-2"].of == "llama2-70b"
    over = figures_found["overview"]
    assert [trace["meta"] for trace in over.data] == ["llama2-7b", "llama2-70b"]
    assert [trace["y"][0] for trace in over.data] == [100, 100]
    assert over.data[1]["x"][0] == 64
    assert "overview" not in found()
    assert words_of([setting_of(record())]) == ("llama2-7b, 4,096 tokens, dgx-h100, batch 2 per device",)


def test_the_best_is_by_the_objective():
    slow = replace(record("slow", 8), tokens_per_s=1e4, tokens_per_joule=99.0, objective="energy")
    fast = replace(record("fast", 8), tokens_per_s=1e6, tokens_per_joule=1.0, objective="energy")
    assert group([slow, fast]).best == (slow,)
    assert group([replace(each, objective="throughput") for each in (slow, fast)]).best[0].strategy == "fast"


def test_published_of_a_quantity_stand_in_its_figure_only():
    asked = study(published=(Published("power", "somewhere", "power_w_per_device", ((128, 658.0), (4096, 620.0))),))
    made = found(asked)
    figure = made["power-w-per-device-1"]
    assert traces(figure, "power (published)")[0]["y"] == [658, 620]
    assert figure.layout["xaxis"]["tickvals"][-1] == 4096
    assert figure.rows[-1] == ("4,096", "", "", "", "620 W")
    assert not traces(made["throughput-1"], "power (published)")


def test_shares_that_others_published_stand_beside_ours():
    per_device = "tokens_per_s_per_device"
    asked = study(
        published=(
            Published("FSDP 7B", "a paper", per_device, ((128, 1.0), (2048, 0.6278)), relative_to=128),
            Published("FSDP 1B", "a table", per_device, ((128, 1.0), (512, 0.923)), relative_to=128),
            Published("DP", "a figure", per_device, ((8, 1.0), (256, 0.39)), relative_to=8),
        )
    )
    made = found(asked)
    figure = made["kept-tokens-per-s-per-device-1"]
    assert traces(figure, "FSDP 7B (published)")[0]["y"] == [100, 62.78]
    (own,) = traces(figure, "fsdp")
    kept = group().at("fsdp", 2048).tokens_per_s_per_device / group().at("fsdp", 128).tokens_per_s_per_device
    assert own["y"][SCALES.index(128)] == 100
    assert own["y"][-1] == pytest.approx(100 * kept, rel=1e-5)
    assert not traces(figure, "ddp")  # which does not fit on 128
    assert not traces(made["throughput-1"], "FSDP 7B (published)")
    assert not traces(made["tokens-per-s-per-device-1"], "FSDP 7B (published)")
    elsewhere = replace(asked, published=(replace(asked.published[0], relative_to=3),))
    assert "kept-tokens-per-s-per-device-1" not in found(elsewhere)


def test_of_equal_points_the_first_counts():
    twice = [*records(), *(replace(each, tokens_per_s=1.0) for each in records() if each.fits)]
    assert group(twice) == group()


def test_plotly_knows_every_property():
    from plotly.graph_objects import Figure

    for figure in found(None, [*records(), *records(model="m")]).values():
        Figure(data=figure.data, layout=figure.layout)


def test_steps_are_figures_too():
    from plotly.graph_objects import Figure

    (figure,) = step_figures({"fsdp <b>": timeline(ranks=2, microbatches=3)})
    forward, backward = figure.data
    assert (figure.id, figure.title) == ("step-1", "One step: fsdp <b>")
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert forward["y"] == ["rank 0"] * 3 + ["rank 1"] * 3
    assert forward["base"][0] == 0
    assert backward["x"][0] == pytest.approx(2 * forward["x"][0], rel=1e-4)
    assert figure.rows
    assert all(f".{style} {{ fill: {colour}; }}" in part("gantt.css") for style, colour in STEP_COLOURS.items())
    Figure(data=figure.data, layout=figure.layout)


def test_every_figure_has_its_numbers_in_a_table():
    for figure in found().values():
        assert figure.rows, figure.id
        assert all(len(row) == len(figure.columns) for row in figure.rows), figure.id


@pytest.mark.parametrize("value", [None, 0.0, math.nan, math.inf, 1e300])
def test_odd_numbers_are_drawn_or_left_out(value):
    names = (
        "mfu",
        "tokens_per_s_per_device",
        "train_s",
        "train_usd",
        "power_w_per_device",
        "goodput_share",
        "needed_bytes",
    )
    odd = [replace(each, **dict.fromkeys(names, value)) if each.fits else each for each in records()]
    for figure in found(None, odd).values():
        for trace in figure.data:
            for number in (*trace["x"], *trace["y"]):
                assert not isinstance(number, float) or math.isfinite(number)


def test_marks_of_logarithms_are_few_and_round():
    assert log_axis("s", [90, 1100])["ticktext"] == ["100", "200", "500", "1k"]
    assert log_axis("s", [1e3, 1e12])["ticktext"] == [f"{n}{unit}" for unit in "kMB" for n in (1, 10, 100)] + ["1T"]
    assert "range" not in log_axis("s", [None, 0.0])
    assert len(log_axis("s", [3.0, 3.1]).get("tickvals", ())) != 1


def test_chosen_are_the_ends_and_the_middle():
    assert chosen(range(9)) == (0, 4, 8)
    assert chosen(range(2)) == (0, 1)
