"""Pipelines as data: actions, placements, orders, passes, proof, evaluation, pictures. Knows integers, not models."""

from wavetrain.schedule.action import Action, Actions, Kind
from wavetrain.schedule.bound import lower_bound
from wavetrain.schedule.derive import Derived, derive
from wavetrain.schedule.evaluate import Costs, Evaluation, evaluate
from wavetrain.schedule.passes import add_communication, add_recomputation, add_reduction, add_sharding
from wavetrain.schedule.placement import Placement
from wavetrain.schedule.schedules import SCHEDULES, Schedule, Shape
from wavetrain.schedule.text import parse_text, write_text
from wavetrain.schedule.verify import Proof, ScheduleError, verify

__all__ = [
    "SCHEDULES",
    "Action",
    "Actions",
    "Costs",
    "Derived",
    "Evaluation",
    "Kind",
    "Placement",
    "Proof",
    "Schedule",
    "ScheduleError",
    "Shape",
    "add_communication",
    "add_recomputation",
    "add_reduction",
    "add_sharding",
    "derive",
    "evaluate",
    "lower_bound",
    "parse_text",
    "verify",
    "write_text",
]
