"""Keeping house in stores: merge, subset, delete, upgrade, upload."""
