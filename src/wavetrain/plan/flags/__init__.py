"""Plans from what people already give to other programs: Megatron-LM's flags, DeepSpeed's config."""

from wavetrain.plan.flags.deepspeed import plan_of_deepspeed
from wavetrain.plan.flags.given import plan_of_given
from wavetrain.plan.flags.megatron import plan_of_megatron

__all__ = ["plan_of_deepspeed", "plan_of_given", "plan_of_megatron"]
