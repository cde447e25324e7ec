"""Stores of other tools: one file a sample. What is in them, and how such files are written."""
