"""States of the transformers engine, stored beside the next forward pass: each sample's own."""

import pytest
import torch

from paceline.store import Store
from paceline.target.model import load_model
from paceline.target.spec import Target, TargetReference
from tests.lines import TINY_LAYERS, extracted

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("max_batch_tokens", [60, 400])
def test_stored_rows_are_those_of_a_plain_forward_on_the_cpu(tmp_path, max_batch_tokens):
    store = Store(extracted(tmp_path, max_batch_tokens=max_batch_tokens))
    assert store.manifest.result["engine"]["settings"]["device"] == "cuda"
    model = load_model(Target(TargetReference(str(tmp_path / "target"))), torch.float32, "cpu")
    assert len(store) == 30
    for i in range(len(store)):
        sample = store.read(i)
        with torch.no_grad():
            hidden = model(sample.input_ids[None].long(), output_hidden_states=True).hidden_states
        for a, k in enumerate(TINY_LAYERS):
            plain = hidden[k][0, : len(sample.aux)]
            torch.testing.assert_close(sample.aux[:, a], plain, rtol=1e-3, atol=1e-4)
