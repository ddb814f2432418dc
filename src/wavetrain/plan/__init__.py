"""Plans: layout, choices, stack, stage cut; checks; reading and writing."""

from wavetrain.plan.check import check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import OperatorChoice, Plan
from wavetrain.plan.read import read_plan, write_plan
from wavetrain.plan.request import Request, plan_of
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack

__all__ = [
    "AttentionImpl",
    "Choice",
    "Fusion",
    "Layout",
    "OperatorChoice",
    "Plan",
    "Precision",
    "Recompute",
    "Request",
    "Stack",
    "check",
    "even_cut",
    "plan_of",
    "read_plan",
    "write_plan",
]
