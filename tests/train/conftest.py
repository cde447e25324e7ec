"""What tests of training start from."""

import pytest

from ..lines import extracted


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    folder = tmp_path_factory.mktemp("line")
    extracted(folder)
    return folder
