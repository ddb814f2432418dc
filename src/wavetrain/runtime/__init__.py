"""Runs plans with PyTorch: stages of a model, messages between ranks, one interpreter of actions. Needs torch."""
