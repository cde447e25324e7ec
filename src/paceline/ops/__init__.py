"""Kernels and the one place that chooses between them; each stands beside its plain-torch twin."""
