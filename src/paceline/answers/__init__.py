"""Answers by the target itself: what an engine is given, what it gives back, and the engines."""
