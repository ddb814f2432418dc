"""What happened when: events and counters of a run or a simulation, their files and their differences."""

from wavetrain.timeline.chrome import read_chrome, write_chrome
from wavetrain.timeline.difference import Difference, Shift, difference
from wavetrain.timeline.timeline import Counter, Event, Timeline

__all__ = ["Counter", "Difference", "Event", "Shift", "Timeline", "difference", "read_chrome", "write_chrome"]
