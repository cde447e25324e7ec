"""The CUDA kernels of `attention`, in the manner of FlashAttention-2.

The P = H / G query heads of a group share its keys, so a tile's rows are (row, head) pairs. Which
keys a row sees is read from tensors: other lengths need no other kernel. Own keys are a tail of the
online softmax: one product of vectors each. Scores are in units of log 2, as exp2 is what the
hardware has.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
# A hidden key's score: exp2 of its distance to a real score is 0, and that to itself is a number.
_HIDDEN = tl.constexpr(-1.0e30)
_COUNTS = ["num_rows", "num_keys", "num_own"]


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, warps and loads in flight of one kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


def _tiles(head_dim: int, dtype: torch.dtype) -> dict[str, Tile]:
    """By the shared memory that tiles of this width need; measured on an H200 for widths of 64 and
    128 in bfloat16."""
    if dtype == torch.float32:
        small = Tile(32, 32, 4, 1)
        return {"forward": small, "queries": small, "keys": small}
    if head_dim <= 64:
        wide = Tile(128, 64, 4, 3)
        return {"forward": wide, "queries": wide, "keys": Tile(64, 64, 4, 2)}
    if head_dim <= 128:
        return {
            "forward": Tile(64, 64, 4, 3),
            "queries": Tile(64, 64, 4, 2),
            "keys": Tile(64, 64, 4, 2),
        }
    small = Tile(64, 32, 4, 2)
    return {"forward": small, "queries": small, "keys": Tile(32, 64, 8, 2)}


@triton.jit
def _tile_rows(key_start, key_last, num_rows, P: tl.constexpr, ROWS: tl.constexpr):
    """(row, head, inside, first and last key of each tile row); rows outside see nothing."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows * P
    row = index // P
    first = tl.load(key_start + row, mask=inside, other=2147483647).to(tl.int32)
    last = tl.load(key_last + row, mask=inside, other=-1).to(tl.int32)
    return row, tl.program_id(1) * P + index % P, inside, first, last


@triton.jit
def _key_ranges(
    key_start, key_last, num_rows, P: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Keys that some row of the tile sees, [low, high); within them, on borders of key blocks,
    those that all rows see, [whole_low, whole_high)."""
    top = tl.program_id(0) * ROWS // P
    bottom = tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // P, num_rows - 1)
    low = tl.load(key_start + top).to(tl.int32)
    high = tl.load(key_last + bottom).to(tl.int32) + 1
    all_from = tl.load(key_start + bottom).to(tl.int32)
    all_to = tl.load(key_last + top).to(tl.int32) + 1
    whole_low = tl.minimum(low + tl.cdiv(all_from - low, KEYS) * KEYS, high)
    whole_high = low + tl.maximum(all_to - low, 0) // KEYS * KEYS
    return low, high, whole_low, tl.maximum(whole_high, whole_low)


@triton.jit
def _own_rows(step, row, num_rows, own_stride):
    """Where rows of own [J, R, 2G, K] lie, whose steps are one after the other. Out of a product
    with the stride of rows, which a model fixes: Triton moves 16 bytes at a time only where it
    knows that rows begin at multiples of them."""
    return (step * num_rows.to(tl.int64) + row) * own_stride


@triton.jit
def _load_rows(
    pointer, inside, width, CHECK: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile [rows, BLOCK] at pointers of its elements; zeros outside. CHECK: some rows may be
    outside; FULL: the width is the block's, so that no column is."""
    if not FULL:
        there = (tl.arange(0, BLOCK) < width)[None, :]
        if CHECK:
            there = there & inside[:, None]
        tile = tl.load(pointer, mask=there, other=0.0)
    elif CHECK:
        tile = tl.load(pointer, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile


@triton.jit
def _attend_keys(
    acc, peak, total, q, kv, kv_stride, low, high, first, last, width, scale, group_at, value_at,
    MASKED: tl.constexpr, FULL: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Within a tile 32 bits are enough; what moves is one pointer.
    tile = tl.arange(0, KEYS)[:, None] * kv_stride + tl.arange(0, BLOCK)[None, :]
    stride = kv_stride.to(tl.int64)
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        block = kv + begin * stride
        k = _load_rows(block + group_at + tile, key < high, width, MASKED, FULL, BLOCK)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
            score = tl.where(seen, score, _HIDDEN)
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weight, 1)
        v = _load_rows(block + value_at + tile, key < high, width, MASKED, FULL, BLOCK)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=_COUNTS)
def _forward(
    q, kv, own, out, lse, key_start, key_last, num_rows, num_own, q_stride, kv_stride,
    own_stride, groups, width, scale,
    P: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, inside, first, last = _tile_rows(key_start, key_last, num_rows, P, ROWS)
    low, high, whole_low, whole_high = _key_ranges(key_start, key_last, num_rows, P, ROWS, KEYS)
    column = tl.arange(0, BLOCK)
    there = inside[:, None] & (column < width)[None, :]
    head_at = row.to(tl.int64)[:, None] * q_stride + head[:, None] * width + column[None, :]
    q_tile = tl.load(q + head_at, mask=there, other=0.0)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    peak = tl.full([ROWS], _HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    group_at = tl.program_id(1) * width
    value_at = group_at + groups * width
    acc, peak, total = _attend_keys(
        acc, peak, total, q_tile, kv, kv_stride, low, tl.minimum(whole_low, high), first, last,
        width, scale, group_at, value_at, True, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    acc, peak, total = _attend_keys(
        acc, peak, total, q_tile, kv, kv_stride, whole_low, whole_high, first, last,
        width, scale, group_at, value_at, False, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    acc, peak, total = _attend_keys(
        acc, peak, total, q_tile, kv, kv_stride, whole_high, high, first, last,
        width, scale, group_at, value_at, True, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    for step in range(num_own):
        at = own + _own_rows(step, row, num_rows, own_stride)[:, None] + column[None, :]
        k = tl.load(at + group_at, mask=there, other=0.0).to(tl.float32)
        score = tl.sum(q_tile.to(tl.float32) * k, 1) * scale
        new_peak = tl.maximum(peak, score)
        weight = tl.exp2(score - new_peak)
        fade = tl.exp2(peak - new_peak)
        v = tl.load(at + value_at, mask=there, other=0.0).to(tl.float32)
        acc = acc * fade[:, None] + weight[:, None] * v
        total = total * fade + weight
        peak = new_peak
    heads = groups * P
    out_at = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + row * heads + head, peak + tl.log2(total), mask=inside)


@triton.jit
def _query_gradient(
    acc, q, upper, lse, delta, kv, kv_stride, low, high, first, last, width, scale, group_at,
    value_at,
    MASKED: tl.constexpr, FULL: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, KEYS)[:, None] * kv_stride + tl.arange(0, BLOCK)[None, :]
    stride = kv_stride.to(tl.int64)
    for begin in range(low, high, KEYS):
        key = begin + tl.arange(0, KEYS)
        block = kv + begin * stride
        k = _load_rows(block + group_at + tile, key < high, width, MASKED, FULL, BLOCK)
        v = _load_rows(block + value_at + tile, key < high, width, MASKED, FULL, BLOCK)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        weight = tl.exp2(score - lse[:, None])
        if MASKED:
            seen = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
            weight = tl.where(seen, weight, 0.0)
        slope = tl.dot(upper, tl.trans(v), input_precision=PRECISION)
        slope = weight * (slope - delta[:, None])
        acc = tl.dot(slope.to(k.dtype), k, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=_COUNTS)
def _backward_queries(
    q, kv, own, out, grad, lse, deltas, grad_q, key_start, key_last, num_rows, num_own, q_stride,
    kv_stride, own_stride, groups, width, scale, unit,
    P: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head, inside, first, last = _tile_rows(key_start, key_last, num_rows, P, ROWS)
    low, high, whole_low, whole_high = _key_ranges(key_start, key_last, num_rows, P, ROWS, KEYS)
    column = tl.arange(0, BLOCK)
    there = inside[:, None] & (column < width)[None, :]
    heads = groups * P
    out_at = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
    upper = tl.load(grad + out_at, mask=there, other=0.0)
    mixed = tl.load(out + out_at, mask=there, other=0.0)
    delta = tl.sum(upper.to(tl.float32) * mixed.to(tl.float32), 1)
    tl.store(deltas + row * heads + head, delta, mask=inside)
    peak = tl.load(lse + row * heads + head, mask=inside, other=0.0)
    head_at = row.to(tl.int64)[:, None] * q_stride + head[:, None] * width + column[None, :]
    q_tile = tl.load(q + head_at, mask=there, other=0.0)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    group_at = tl.program_id(1) * width
    value_at = group_at + groups * width
    acc = _query_gradient(
        acc, q_tile, upper, peak, delta, kv, kv_stride, low, tl.minimum(whole_low, high), first,
        last, width, scale, group_at, value_at, True, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    acc = _query_gradient(
        acc, q_tile, upper, peak, delta, kv, kv_stride, whole_low, whole_high, first,
        last, width, scale, group_at, value_at, False, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    acc = _query_gradient(
        acc, q_tile, upper, peak, delta, kv, kv_stride, whole_high, high, first,
        last, width, scale, group_at, value_at, True, FULL, KEYS, BLOCK, PRECISION,
    )  # fmt: skip
    for step in range(num_own):
        at = own + _own_rows(step, row, num_rows, own_stride)[:, None] + column[None, :]
        k = tl.load(at + group_at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(at + value_at, mask=there, other=0.0).to(tl.float32)
        weight = tl.exp2(tl.sum(q_tile.to(tl.float32) * k, 1) * scale - peak)
        slope = weight * (tl.sum(upper.to(tl.float32) * v, 1) - delta)
        acc += slope[:, None] * k
    tl.store(grad_q + out_at, (acc * unit).to(grad_q.dtype.element_ty), mask=there)


@triton.jit
def _key_gradient(
    acc_k, acc_v, k, v, key, q, grad, lse, deltas, key_start, key_last, low, high, end, q_stride,
    heads, width, scale,
    MASKED: tl.constexpr, FULL: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    for begin in range(low, high, ROWS):
        index = begin + tl.arange(0, ROWS)
        inside = index < end
        row = index // P
        head = tl.program_id(1) * P + index % P
        # Within a tile 32 bits are enough.
        top = begin // P
        head_at = ((row - top) * q_stride + head * width)[:, None] + column[None, :]
        out_at = (((row - top) * heads + head) * width)[:, None] + column[None, :]
        q_top = q + top * q_stride.to(tl.int64)
        grad_top = grad + top * (heads * width).to(tl.int64)
        q_tile = _load_rows(q_top + head_at, inside, width, MASKED, FULL, BLOCK)
        upper = _load_rows(grad_top + out_at, inside, width, MASKED, FULL, BLOCK)
        peak = tl.load(lse + row * heads + head, mask=inside, other=0.0)
        delta = tl.load(deltas + row * heads + head, mask=inside, other=0.0)
        score = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * scale
        weight = tl.exp2(score - peak[None, :])
        if MASKED:
            first = tl.load(key_start + row, mask=inside, other=2147483647).to(tl.int32)
            last = tl.load(key_last + row, mask=inside, other=-1).to(tl.int32)
            seen = (key[:, None] >= first[None, :]) & (key[:, None] <= last[None, :])
            weight = tl.where(seen, weight, 0.0)
        acc_v = tl.dot(weight.to(upper.dtype), upper, acc_v, input_precision=PRECISION)
        slope = tl.dot(v, tl.trans(upper), input_precision=PRECISION)
        slope = weight * (slope - delta[None, :])
        acc_k = tl.dot(slope.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=_COUNTS)
def _backward_keys(
    q, kv, grad, lse, deltas, grad_kv, key_start, key_last, row_borders, num_keys, q_stride,
    kv_stride, groups, width, scale, unit,
    P: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK)
    there = (key < num_keys)[:, None] & (column < width)[None, :]
    group_at = tl.program_id(1) * width
    value_at = group_at + groups * width
    at = key.to(tl.int64)[:, None] * kv_stride + column[None, :]
    k = tl.load(kv + group_at + at, mask=there, other=0.0)
    v = tl.load(kv + value_at + at, mask=there, other=0.0)
    acc_k = tl.zeros([KEYS, BLOCK], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK], tl.float32)
    heads = groups * P
    # Rows that see some of the keys, [low, high); within them those that see all.
    blocks, block = tl.num_programs(0), row_borders + tl.program_id(0)
    low = tl.load(block).to(tl.int32) * P
    whole_low = tl.load(block + blocks).to(tl.int32) * P
    high = tl.load(block + 2 * blocks).to(tl.int32) * P
    whole_high = tl.load(block + 3 * blocks).to(tl.int32) * P
    whole_low = tl.minimum(low + tl.cdiv(whole_low - low, ROWS) * ROWS, high)
    whole_high = low + tl.maximum(whole_high - low, 0) // ROWS * ROWS
    whole_high = tl.maximum(whole_high, whole_low)
    acc_k, acc_v = _key_gradient(
        acc_k, acc_v, k, v, key, q, grad, lse, deltas, key_start, key_last, low, whole_low, high,
        q_stride, heads, width, scale, True, FULL, P, ROWS, BLOCK, PRECISION,
    )  # fmt: skip
    acc_k, acc_v = _key_gradient(
        acc_k, acc_v, k, v, key, q, grad, lse, deltas, key_start, key_last, whole_low, whole_high,
        high, q_stride, heads, width, scale, False, FULL, P, ROWS, BLOCK, PRECISION,
    )  # fmt: skip
    acc_k, acc_v = _key_gradient(
        acc_k, acc_v, k, v, key, q, grad, lse, deltas, key_start, key_last, whole_high, high, high,
        q_stride, heads, width, scale, True, FULL, P, ROWS, BLOCK, PRECISION,
    )  # fmt: skip
    out_kv = grad_kv + key.to(tl.int64)[:, None] * (2 * groups * width) + column[None, :]
    kind = grad_kv.dtype.element_ty
    tl.store(out_kv + group_at, (acc_k * unit).to(kind), mask=there)
    tl.store(out_kv + value_at, acc_v.to(kind), mask=there)


@triton.jit(do_not_specialize=_COUNTS)
def _backward_own(
    q, own, grad, lse, deltas, grad_own, num_rows, q_stride, own_stride, groups, width,
    scale, unit,
    P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    column = tl.arange(0, BLOCK)
    there = inside[:, None] & (column < width)[None, :]
    step = tl.program_id(2).to(tl.int64)
    group_at = tl.program_id(1) * width
    value_at = group_at + groups * width
    at = own + _own_rows(step, row, num_rows, own_stride)[:, None] + column[None, :]
    k = tl.load(at + group_at, mask=there, other=0.0).to(tl.float32)
    v = tl.load(at + value_at, mask=there, other=0.0).to(tl.float32)
    acc_k = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_v = tl.zeros([ROWS, BLOCK], tl.float32)
    heads = groups * P
    for i in range(P):
        head = tl.program_id(1) * P + i
        head_at = row.to(tl.int64)[:, None] * q_stride + head * width + column[None, :]
        out_at = (row.to(tl.int64) * heads + head)[:, None] * width + column[None, :]
        q_tile = tl.load(q + head_at, mask=there, other=0.0).to(tl.float32)
        upper = tl.load(grad + out_at, mask=there, other=0.0).to(tl.float32)
        peak = tl.load(lse + row * heads + head, mask=inside, other=0.0)
        delta = tl.load(deltas + row * heads + head, mask=inside, other=0.0)
        weight = tl.exp2(tl.sum(q_tile * k, 1) * scale - peak)
        slope = weight * (tl.sum(upper * v, 1) - delta)
        acc_k += slope[:, None] * q_tile
        acc_v += weight[:, None] * upper
    size = num_rows.to(tl.int64) * 2 * groups * width
    out = grad_own + step * size + row.to(tl.int64)[:, None] * (2 * groups * width)
    kind = grad_own.dtype.element_ty
    tl.store(out + column[None, :] + group_at, (acc_k * unit).to(kind), mask=there)
    tl.store(out + column[None, :] + value_at, acc_v.to(kind), mask=there)


class _RowsAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, own, key_start, key_last):
        num_rows, heads, width = q.shape
        shape = _Shape.of(q, kv, own)
        out = q.new_empty(num_rows, heads, width)
        lse = q.new_empty(num_rows, heads, dtype=torch.float32)
        tile = shape.tiles["forward"]
        if num_rows:
            _forward[shape.grid(tile)](
                q, kv, kv if own is None else own, out, lse, key_start, key_last, num_rows,
                shape.num_own, q.stride(0), kv.stride(0), shape.own_stride,
                shape.groups, width, shape.unit * _LOG2_E, P=shape.per_group,
                FULL=shape.block == width, ROWS=tile.rows, KEYS=tile.keys, BLOCK=shape.block,
                PRECISION=shape.precision, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        ctx.save_for_backward(q, kv, own, out, lse, key_start, key_last)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, kv, own, out, lse, key_start, key_last = ctx.saved_tensors
        grad = grad.contiguous()
        shape = _Shape.of(q, kv, own)
        num_rows, width = len(q), shape.width
        grad_q = torch.empty_like(out)
        grad_kv = kv.new_empty(kv.shape)
        grad_own = None if own is None else own.new_empty(own.shape)
        if not num_rows:
            return grad_q, grad_kv.zero_(), grad_own, None, None
        deltas = torch.empty_like(lse)
        common = {"P": shape.per_group, "BLOCK": shape.block}
        tiled = {**common, "FULL": shape.block == width, "PRECISION": shape.precision}
        tile, scale = shape.tiles["queries"], shape.unit * _LOG2_E
        _backward_queries[shape.grid(tile)](
            q, kv, kv if own is None else own, out, grad, lse, deltas, grad_q, key_start, key_last,
            num_rows, shape.num_own, q.stride(0), kv.stride(0), shape.own_stride,
            shape.groups, width, scale, shape.unit, ROWS=tile.rows,
            KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **tiled,
        )  # fmt: skip
        tile = shape.tiles["keys"]
        borders = _row_borders(key_start, key_last, len(kv), tile.keys)
        _backward_keys[(borders.shape[1], shape.groups)](
            q, kv, grad, lse, deltas, grad_kv, key_start, key_last, borders, len(kv), q.stride(0),
            kv.stride(0), shape.groups, width, scale, shape.unit, ROWS=tile.rows, KEYS=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, **tiled,
        )  # fmt: skip
        if own is not None:
            _backward_own[(triton.cdiv(num_rows, 16), shape.groups, len(own))](
                q, own, grad, lse, deltas, grad_own, num_rows, q.stride(0), shape.own_stride,
                shape.groups, width, scale, shape.unit, ROWS=16, **common,
            )  # fmt: skip
        return grad_q, grad_kv, grad_own, None, None


def _row_borders(
    key_start: torch.Tensor, key_last: torch.Tensor, num_keys: int, block: int
) -> torch.Tensor:
    """For each block of keys the rows that see some of them and those that see all: int64 [4,
    blocks], first of some, first of all, end of some, end of all. Both tensors ascend, so these are
    ranges."""
    low = torch.arange(0, num_keys, block, device=key_start.device)
    edges = low + _edge_offsets(block, key_start.device)
    borders = torch.empty_like(edges)
    torch.searchsorted(key_last, edges[:2], out=borders[:2])
    torch.searchsorted(key_start, edges[2:], out=borders[2:])
    return borders


@functools.cache
def _edge_offsets(block: int, device: torch.device) -> torch.Tensor:
    """From a block's first key to what its borders are searched by, int64 [4, 1]. Kept, since the
    host would wait for each copy to the device."""
    return torch.tensor([[0], [block - 1], [block], [1]], device=device)


@dataclass(frozen=True)
class _Shape:
    """What all four launches need to know of q [R, H, K], kv [T, 2G, K] and own [J, R, 2G, K]."""

    groups: int
    per_group: int
    width: int
    num_own: int
    own_stride: int
    num_rows: int
    tiles: dict[str, Tile]
    block: int
    precision: str

    @classmethod
    def of(cls, q: torch.Tensor, kv: torch.Tensor, own: torch.Tensor | None) -> "_Shape":
        num_rows, heads, width = q.shape
        groups = kv.shape[1] // 2
        return cls(
            groups=groups,
            per_group=heads // groups,
            width=width,
            num_own=0 if own is None else len(own),
            own_stride=0 if own is None else own.stride(1),
            num_rows=num_rows,
            tiles=_tiles(width, q.dtype),
            block=max(triton.next_power_of_2(width), 16),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
        )

    @property
    def unit(self) -> float:
        return self.width**-0.5

    def grid(self, tile: Tile) -> tuple[int, int]:
        return triton.cdiv(self.num_rows * self.per_group, tile.rows), self.groups


def rows_attention(q, kv, own, spans):
    """Heads side by side within a row (their strides are the head width); see `attention`."""
    if own is not None and len(own) > 1:
        own = own.contiguous()
    return _RowsAttention.apply(q, kv, own, spans.key_start, spans.key_last)
