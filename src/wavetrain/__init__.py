"""Wavetrain: this model, this cluster: how should it be trained, how fast, at what cost.

    import wavetrain as wt
    model = wt.load_model("llama2-7b", seq_len=4096)
    cluster = wt.load_cluster("dgx-h100:4")
    plan = wt.search(model, cluster, global_batch=512).best

Names are loaded when first used, so that importing the package costs nothing and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from wavetrain.base.errors import InputError, WavetrainError
    from wavetrain.cluster import Cluster, Device, load_cluster
    from wavetrain.model import Model, Work, load_model
    from wavetrain.model.traced import trace
    from wavetrain.plan import Plan
    from wavetrain.planner.ask import search
    from wavetrain.runtime.parallelize import parallelize
    from wavetrain.sim.predict import simulate
    from wavetrain.timeline import Timeline

_HOME = {
    "Cluster": "wavetrain.cluster",
    "Device": "wavetrain.cluster",
    "InputError": "wavetrain.base.errors",
    "Model": "wavetrain.model",
    "Plan": "wavetrain.plan",
    "Timeline": "wavetrain.timeline",
    "WavetrainError": "wavetrain.base.errors",
    "Work": "wavetrain.model",
    "load_cluster": "wavetrain.cluster",
    "load_model": "wavetrain.model",
    "parallelize": "wavetrain.runtime.parallelize",
    "search": "wavetrain.planner.ask",
    "simulate": "wavetrain.sim.predict",
    "trace": "wavetrain.model.traced",
}

__all__ = [
    "Cluster",
    "Device",
    "InputError",
    "Model",
    "Plan",
    "Timeline",
    "WavetrainError",
    "Work",
    "__version__",
    "load_cluster",
    "load_model",
    "parallelize",
    "search",
    "simulate",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'wavetrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
