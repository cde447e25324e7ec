"""The real target's tokenizer, loaded once."""

import pytest

from paceline.target.spec import Target, TargetReference
from tests.conftest import SMOLLM2
from tests.prepare.masking import Masking


@pytest.fixture(scope="session")
def smollm2() -> Target:
    return Target(TargetReference(SMOLLM2))


@pytest.fixture(scope="session")
def real_masking(smollm2: Target) -> Masking:
    return Masking(smollm2.tokenizer, ["<|im_end|>"])
