"""Acceptance length: its one definition, and the exact walk of a draft over recorded answers. A
library: `evaluate` measures with it, `train` watches its held-out data with it."""
