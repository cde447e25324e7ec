"""How often the store is tormented: PACELINE_ROUNDS, a few in the normal tests, 200 in `make
torture`. Counts of what was done are printed; `pytest -s` shows them."""

import os

ROUNDS = int(os.environ.get("PACELINE_ROUNDS", "12"))
IS_TORTURE = ROUNDS >= 200
