"""An order with the times that its actions were measured to take."""

import pytest

from wavetrain.schedule import SCHEDULES, Actions, Shape
from wavetrain.sim import engine
from wavetrain.sim.engine import StageTimes
from wavetrain.sim.replay import idle_share, replay
from wavetrain.timeline.timeline import Event, Timeline


def simulated(kind: str) -> tuple[Actions, engine.Result]:
    actions = SCHEDULES[kind].order(Shape(3, 4, waves=1))
    times = [StageTimes(f=1.0 + stage, i=2.0, w=2.0) for stage in range(actions.placement.num_stages)]
    return actions, engine.run(engine.compile(actions), times)


@pytest.mark.parametrize("kind", ["1f1b", "wave", "zb-h1", "gpipe"])
def test_a_simulated_timeline_replays_to_itself(kind: str) -> None:
    actions, result = simulated(kind)
    again = replay(actions, result.timeline)
    assert again.duration_s == result.makespan_s
    assert set(again.events) == {e for e in result.timeline.events if e.lane == "compute"}


def test_what_a_runtime_adds_between_actions_is_left_out() -> None:
    actions, result = simulated("wave")
    events = result.timeline.events
    late = Timeline(tuple(Event(2 * e.start_s, 2 * e.start_s + e.duration_s, e.rank, e.lane, e.name) for e in events))
    assert replay(actions, late).duration_s == result.makespan_s


def test_idle_share_is_what_is_not_busy() -> None:
    two = Timeline((Event(0.0, 2.0, 0, "compute", "0F0"), Event(2.0, 3.0, 1, "compute", "1F0")))
    assert idle_share(two) == pytest.approx(0.5)
    assert idle_share(Timeline()) == 0.0
