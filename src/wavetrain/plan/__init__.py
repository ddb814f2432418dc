"""Plans: layout, choices, stack, stage cut; checks; reading and writing."""

from wavetrain.plan.check import check
from wavetrain.plan.cut import even_cut
from wavetrain.plan.layout import Choice, Layout, Recompute
from wavetrain.plan.plan import EVERY, OperatorChoice, Plan, Variant
from wavetrain.plan.read import read_plan, write_plan
from wavetrain.plan.request import Request, plan_of
from wavetrain.plan.stack import AttentionImpl, Fusion, Precision, Stack

__all__ = [
    "EVERY",
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
    "Variant",
    "check",
    "even_cut",
    "plan_of",
    "read_plan",
    "write_plan",
]
