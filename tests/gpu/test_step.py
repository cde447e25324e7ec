"""The training step on CUDA against the same step on the CPU, whose oracle is in tests/draft."""

import copy

import pytest
import torch

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.draft.unroll import Unroll
from paceline.ops import attention, attention_triton, distil_triton, heads_triton, norm_triton
from tests.draft.tiny import random_doc, stored, tiny_config, tiny_draft

pytestmark = pytest.mark.gpu

VARIANTS = [
    {},
    {"head_dim": 64, "hidden_size": 48, "target_hidden_size": 48, "num_attention_heads": 6},
    {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "aux_norm": "joint"},
    {"num_layers": 2, "qk_norm": True, "norm_output": True},
    {"norm_before_residual": True, "aux_norm": "none", "hidden_size": 12, "head_dim": 6},
]


def masks(generator, count, longest):
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    drawn = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    for mask in drawn:
        mask[-1] = True
    return drawn


def loss_and_gradients(draft, docs, device, dtype, objective="kl"):
    draft = copy.deepcopy(draft).to(device, dtype)
    config = draft.config
    head = torch.randn(
        config.vocab_size, config.target_hidden_size, generator=torch.Generator().manual_seed(9)
    ).to(device, dtype)
    columns = torch.nonzero(draft.t2d).squeeze(1)
    batch = pack([stored(doc) for doc in docs]).to(device, dtype)
    rows = batch.num_supervised_rows
    teacher = Teacher(lambda last: last @ head.T, columns)
    loss, sums = distillation_loss(draft, batch, teacher, 4, 0.8, rows, 50, objective)
    loss.backward()
    gradients = {n: p.grad.cpu() for n, p in draft.named_parameters() if p.grad is not None}
    return loss.detach().cpu(), gradients, torch.stack([sums.kl, sums.agree, sums.overlap]).cpu()


@pytest.mark.parametrize("objective", ["kl", "total_variation", "log_acceptance", "hybrid"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_cuda_equals_the_cpu(changes, objective):
    config = tiny_config(**changes)
    draft = tiny_draft(config)
    generator = torch.Generator().manual_seed(1)
    docs = [random_doc(config, mask, i) for i, mask in enumerate(masks(generator, 9, 200))]
    exact = loss_and_gradients(draft, docs, "cpu", torch.float64, objective)
    given = loss_and_gradients(draft, docs, "cuda", torch.float32, objective)
    torch.testing.assert_close(given[0].double(), exact[0], rtol=1e-4, atol=0)
    assert given[1].keys() == exact[1].keys()
    for name, gradient in exact[1].items():
        error = (given[1][name].double() - gradient).norm() / gradient.norm()
        assert float(error) < 1e-3, (name, float(error))
    torch.testing.assert_close(given[2].double(), exact[2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_attention_in_bfloat16(width):
    """As near to float64 as plain torch in bfloat16 comes, by twice at most."""
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda *size: torch.randn(*size, device="cuda", generator=generator)
    lengths = [700, 1, 33, 500]
    starts = torch.repeat_interleave(torch.tensor([0, 700, 701, 734]), torch.tensor(lengths))
    rows = torch.arange(0, 1234, 2)
    spans = attention.RowSpans(starts[rows].cuda(), rows.cuda())
    inputs = [random(len(rows), 8, width), random(1234, 4, width), random(2, len(rows), 4, width)]
    upper = random(len(rows), 8, width)
    results = {}
    for name, function, dtype in (
        ("exact", attention.rows_attention_torch, torch.float64),
        ("plain", attention.rows_attention_torch, torch.bfloat16),
        ("kernel", attention.rows_attention, torch.bfloat16),
    ):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in inputs]
        out = function(*leaves, spans)
        out.backward(upper.to(dtype))
        results[name] = [out.detach().double(), *(leaf.grad.double() for leaf in leaves)]
    far = lambda name: [
        float((a - b).norm() / b.norm())
        for a, b in zip(results[name], results["exact"], strict=True)
    ]
    for given, allowed in zip(far("kernel"), far("plain"), strict=True):
        assert given < max(2 * allowed, 4e-3), (far("kernel"), far("plain"))


def test_a_document_of_32k_tokens():
    """Gradients of a long document stay within memory and near those of plain torch."""
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda *size: torch.randn(*size, device="cuda", generator=generator).bfloat16()
    rows = torch.arange(16384, 32768, device="cuda")
    spans = attention.RowSpans(torch.zeros_like(rows), rows)
    leaves = [t.requires_grad_() for t in (random(len(rows), 32, 128), random(32768, 16, 128))]
    out = attention.rows_attention(*leaves, None, spans)
    (out * 100).sum().backward()
    some = slice(5000, 5008)
    expected = attention.rows_attention_torch(
        leaves[0][some], leaves[1], None, attention.RowSpans(spans.key_start[some], rows[some])
    )
    torch.testing.assert_close(out[some], expected, rtol=2e-2, atol=1e-3)
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves)


def test_other_lengths_need_no_other_kernel():
    config = tiny_config(head_dim=64, hidden_size=32, target_hidden_size=32)
    draft = tiny_draft(config)
    generator = torch.Generator().manual_seed(2)
    counts = []
    for longest in (20, 90, 91, 64, 130, 16):
        docs = [random_doc(config, m, i) for i, m in enumerate(masks(generator, 5, longest))]
        loss_and_gradients(draft, docs, "cuda", torch.float32)
        counts.append(num_compiled())
    assert counts[-1] - counts[0] <= 4, counts


def num_compiled():
    modules = (attention_triton, distil_triton, heads_triton, norm_triton)
    functions = [v for m in modules for v in vars(m).values() if hasattr(v, "device_caches")]
    return sum(len(c[0]) for f in functions for c in f.device_caches.values())


def test_a_step_asks_the_device_nothing():
    """No host sync between the first kernel and the last: the CPU can run ahead."""
    config = tiny_config()
    draft = tiny_draft(config).to("cuda", torch.float32)
    docs = [random_doc(config, [0, 1, 1, 1, 0, 1, 1], i) for i in range(4)]
    batch = pack([stored(doc) for doc in docs]).to("cuda", torch.float32)
    teacher = Teacher(lambda last: last[:, :12] * 3)
    step = lambda: distillation_loss(draft, batch, teacher, 3, 0.8, 4, 100)[0].backward()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drafting_on_cuda_equals_the_cpu():
    config = tiny_config(num_layers=2)
    draft = tiny_draft(config).float()
    doc = random_doc(config, [1] * 30, 5)
    proposed = []
    for device in ("cpu", "cuda"):
        moved = copy.deepcopy(draft).to(device)
        ids, positions = doc.ids.to(device), torch.arange(29, device=device)
        starts = torch.zeros_like(positions)
        with torch.no_grad():
            unroll = Unroll(moved, doc.aux[:29].float().to(device), ids[1:], positions, starts)
            states = [unroll.first(torch.arange(5, 25, device=device))]
            states += [unroll.next(ids[:20]) for _ in range(2)]
        proposed.append(torch.stack(states).cpu())
    torch.testing.assert_close(*proposed, rtol=1e-4, atol=1e-4)
