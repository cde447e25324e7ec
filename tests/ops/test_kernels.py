"""Every Triton kernel against its plain-torch twin, values and gradients, in float32."""

import pytest
import torch

from paceline.ops import adamw, attention, distil, heads, norm, swiglu
from paceline.ops.kernels import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def outputs_and_gradients(function, *inputs):
    """All outputs, then the gradients of a random weighting of them to all inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((out * random(*out.shape, seed=i)).sum() for i, out in enumerate(outputs)).backward()
    return [out.detach() for out in outputs], [t.grad for t in inputs]


def assert_alike(kernel, twin, *inputs):
    given = outputs_and_gradients(kernel, *inputs)
    expected = outputs_and_gradients(twin, *inputs)
    torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 48), (1100, 20)])
def test_norm(rows, width, has_weight):
    x, grad, added = (random(rows, width, seed=i) for i in range(3))
    weight = random(width, seed=5) if has_weight else None
    out, scales = kernels("norm").scale_rows(x, weight, 1e-5)
    torch.testing.assert_close((out, scales), norm.scale_rows_torch(x, weight, 1e-5))
    for other in (added, None):
        given, expected = (
            function(grad, other, x, weight, scales)
            for function in (kernels("norm").scale_rows_backward, norm.scale_rows_backward_torch)
        )
        torch.testing.assert_close(given, expected, rtol=2e-4, atol=2e-5)


def test_the_twin_of_the_norm_is_torchs():
    x, weight, added = random(5, 12).double(), random(12, seed=1).double(), random(5, 12, seed=2)
    function = lambda x, w: torch.nn.functional.rms_norm(x, (12,), w, 1e-5)
    grad = random(5, 12, seed=3).double()
    expected, gradients = torch.autograd.functional.vjp(function, (x, weight), grad)
    out, scales = norm.scale_rows_torch(x, weight, 1e-5)
    torch.testing.assert_close(out, expected)
    given = norm.scale_rows_backward_torch(grad, added.double(), x, weight, scales)
    torch.testing.assert_close(given, (gradients[0] + added, gradients[1]))


@pytest.mark.parametrize(("num_heads", "rotated", "width"), [(7, 4, 12), (20, 20, 64), (3, 0, 8)])
def test_heads(num_heads, rotated, width):
    x, added = random(5, num_heads * width), random(9, num_heads * width, seed=1)
    cos, sin = random(5, width // 2, seed=2), random(5, width // 2, seed=3)
    source = torch.tensor([0, 3, 4, 5, 8], device=DEVICE)
    module, grad = kernels("heads"), random(5, num_heads, width, seed=4)
    for other, rows in ((added, source), (None, None)):
        given = module.rotate(x, cos, sin, rotated, other, rows)
        torch.testing.assert_close(given, heads.rotate_torch(x, cos, sin, rotated, other, rows))
        sums = [None if other is None else other.clone() for _ in range(2)]
        given = module.unrotate(grad, cos, sin, rotated, sums[0], rows)
        expected = heads.unrotate_torch(grad, cos, sin, rotated, sums[1], rows)
        torch.testing.assert_close((given, sums[0]), (expected, sums[1]))


def test_the_twin_of_heads_is_the_rotation_and_its_transpose():
    x, cos, sin = random(3, 16).double(), *random(2, 3, 4, seed=1).double()
    rows, table = torch.tensor([2, 0, 1], device=DEVICE), random(3, 16, seed=2).double()
    turn = lambda x, table: heads.rotate_torch(x, cos, sin, 1, table, rows)
    matrix = torch.autograd.functional.jacobian(turn, (x, table))
    grad, sums = random(3, 2, 8, seed=3).double(), torch.zeros_like(table)
    given = heads.unrotate_torch(grad, cos, sin, 1, sums, rows)
    torch.testing.assert_close(given, torch.einsum("abc,abcde->de", grad, matrix[0]))
    torch.testing.assert_close(sums, torch.einsum("abc,abcde->de", grad, matrix[1]))
    a, b = x[:, :4] + table[rows, :4], x[:, 4:8] + table[rows, 4:8]
    torch.testing.assert_close(turn(x, table)[:, 0, :4], a * cos - b * sin)


def test_swiglu():
    gate, up, grad = (random(3, 50, seed=i) for i in range(3))
    module = kernels("swiglu")
    product = lambda g, u: torch.nn.functional.silu(g) * u
    expected = product(gate, up)
    torch.testing.assert_close(module.gated_product(gate, up), expected)
    _, gradients = torch.autograd.functional.vjp(product, (gate, up), grad)
    for function in (module.gated_product_backward, swiglu.gated_product_backward):
        given = function(gate.clone(), up.clone(), grad.clone())
        torch.testing.assert_close(given, (*gradients, expected))


def spans_of(lengths, chosen):
    starts = torch.repeat_interleave(
        torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]), torch.tensor(lengths)
    )
    rows = torch.tensor([row for row in range(sum(lengths)) if chosen(row)])
    return attention.RowSpans(starts[rows].to(DEVICE), rows.to(DEVICE))


CASES = [
    # heads, key heads, width, document lengths, which rows ask, own keys
    (4, 2, 16, [40, 1, 70], lambda row: row % 3 > 0, 0),
    (6, 2, 24, [33, 1, 1, 5, 50], lambda row: row % 5 != 1, 3),
    (3, 1, 64, [90], lambda row: row > 40, 2),
    (2, 2, 80, [1], lambda row: True, 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:4]))
def test_attention(case):
    num_heads, groups, width, lengths, chosen, num_own = case
    spans = spans_of(lengths, chosen)
    rows = len(spans.key_last)
    inputs = [random(rows, num_heads, width), random(sum(lengths), 2 * groups, width, seed=1)]
    if num_own:
        inputs.append(random(num_own, rows, 2 * groups, width, seed=2))
    with_spans = lambda function: lambda q, kv, own=None: function(q, kv, own, spans)
    kernel = with_spans(kernels("attention").rows_attention)
    assert_alike(kernel, with_spans(attention.rows_attention_torch), *inputs)


@pytest.mark.parametrize("has_mass", [True, False])
def test_distil(has_mass):
    student, logits = random(6, 300) * 3, random(4, 300, seed=1) * 3
    logits[1, 5] = float("-inf")
    taught_by = torch.tensor([0, 1, 1, 2, 3, 3], device=DEVICE)
    log_mass = -random(4, seed=2).abs() if has_mass else None
    by_kl, by_accepted = random(6, seed=3), random(6, seed=4)
    for slope in (by_accepted, None):
        given, expected = (
            make(logits.clone(), log_mass).score(student.clone(), taught_by)
            for make in (kernels("distil").TritonTeacher, distil.TorchTeacher)
        )
        for name in ("kl", "accepted", "agree"):
            torch.testing.assert_close(getattr(given, name), getattr(expected, name))
        torch.testing.assert_close(given.gradient(by_kl, slope), expected.gradient(by_kl, slope))


@pytest.mark.parametrize("has_copy", [True, False])
def test_adamw(has_copy):
    step = adamw.AdamWStep(rate=0.1, betas=(0.9, 0.95), weight_decay=0.3, number=3)
    for scale in (0.7, float("nan"), float("inf")):
        states = []
        for function in (kernels("adamw").adamw_, adamw.adamw_torch_):
            tensors = [random(1500, seed=i) for i in range(4)]
            tensors[3].abs_()
            tensors += [torch.zeros(1500, device=DEVICE)] if has_copy else [None]
            before = tensors[0].clone()
            function(*tensors, torch.tensor(scale, device=DEVICE), step)
            assert torch.equal(tensors[0], before) == (scale != 0.7)
            states.append(tensors)
        torch.testing.assert_close(*states)


def test_the_twin_of_adamw_is_the_rule():
    weight, gradient, first, second = (random(50, seed=i) for i in range(4))
    second.abs_()
    m = 0.9 * first + 0.1 * gradient * 0.5
    v = 0.95 * second + 0.05 * (gradient * 0.5) ** 2
    moved = m / (1 - 0.9**3) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    expected = weight * (1 - 0.1 * 0.3) - 0.1 * moved
    step = adamw.AdamWStep(rate=0.1, betas=(0.9, 0.95), weight_decay=0.3, number=3)
    half = torch.tensor(0.5, device=DEVICE)
    adamw.adamw_torch_(weight, gradient, first, second, None, half, step)
    torch.testing.assert_close((weight, first, second), (expected, m, v))
