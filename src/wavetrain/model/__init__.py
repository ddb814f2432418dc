"""What is to be trained: operators, layers, models; their readers. `traced` alone needs torch."""

from wavetrain.model.architecture import Architecture
from wavetrain.model.model import Layer, Model, Run
from wavetrain.model.operator import OPERATORS, AttentionKernel, Axis, Operator, Parameter, Work, slice_counts
from wavetrain.model.read import load_model, presets, read_model, write_model

__all__ = [
    "OPERATORS",
    "Architecture",
    "AttentionKernel",
    "Axis",
    "Layer",
    "Model",
    "Operator",
    "Parameter",
    "Run",
    "Work",
    "load_model",
    "presets",
    "read_model",
    "slice_counts",
    "write_model",
]
