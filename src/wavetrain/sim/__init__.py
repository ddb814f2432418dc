"""Prediction: the closed form, the event simulation, and what comes of a plan."""
