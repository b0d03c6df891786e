"""What options do to logits whose lists and counts lie on the device, by the arithmetic of
ops/sampling_logits.py, each row by its own slot.

Every element by itself: nothing depends on the others. Where one step must see what another wrote
elsewhere in the row, it is a launch of its own: the threads of one program don't wait for each
other's writes to memory. (vLLM 0.23.0 fills a row with minus infinity and puts the allowed tokens
back in one program, and under load some stay out.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _penalise_kernel(
    x_ptr, slot_ptr, repetition_ptr, frequency_ptr, presence_ptr, mask_ptr, count_ptr,
    V, stride_x, stride_mask, stride_count, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < V
        x = tl.load(x_ptr + row * stride_x + at, mask=inside, other=0.0)
        said = tl.load(count_ptr + slot * stride_count + at, mask=inside, other=0)
        asked = tl.load(mask_ptr + slot * stride_mask + (at >> 5), mask=inside, other=0)
        seen = (said > 0) | (((asked >> (at & 31)) & 1) != 0)
        if repetition != 1.0:
            by = tl.full((BLOCK,), 1.0, tl.float32) * repetition
            x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, by), x * by), x)
        if frequency != 0.0:
            x = x - said.to(tl.float32) * frequency
        if presence != 0.0:
            x = x - (said > 0).to(tl.float32) * presence
        tl.store(x_ptr + row * stride_x + at, x, mask=inside)


@triton.jit
def _hold_kernel(x_ptr, slot_ptr, n_ptr, id_ptr, held_ptr, stride_x, stride_id, MOST: tl.constexpr):
    """held[row] = the row's logits at its listed tokens."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    at = tl.arange(0, MOST)
    listed = at < tl.load(n_ptr + slot)
    token = tl.load(id_ptr + slot * stride_id + at, mask=listed, other=0)
    held = tl.load(x_ptr + row * stride_x + token, mask=listed, other=0.0)
    tl.store(held_ptr + row * MOST + at, held, mask=listed)


@triton.jit
def _empty_kernel(x_ptr, slot_ptr, n_ptr, V, stride_x, BLOCK: tl.constexpr):
    """Minus infinity everywhere in the rows that list any."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(n_ptr + tl.load(slot_ptr + row)) > 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        none = tl.full((BLOCK,), float("-inf"), tl.float32)
        tl.store(x_ptr + row * stride_x + at, none, mask=at < V)


@triton.jit
def _list_kernel(
    x_ptr, slot_ptr, n_ptr, id_ptr, value_ptr, position_ptr, until_ptr,
    stride_x, stride_id, stride_value, MOST: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """At the row's listed tokens. HOW 0: put value[row] there; 1: add value[slot]; 2: minus
    infinity, while the row's position is below until[slot]. No token is listed twice.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    at = tl.arange(0, MOST)
    listed = at < tl.load(n_ptr + slot)
    if HOW == 2:
        listed = listed & (tl.load(position_ptr + row) < tl.load(until_ptr + slot))
    token = tl.load(id_ptr + slot * stride_id + at, mask=listed, other=0)
    spot = x_ptr + row * stride_x + token
    if HOW == 0:
        value = tl.load(value_ptr + row * stride_value + at, mask=listed, other=0.0)
    elif HOW == 1:
        value = tl.load(spot, mask=listed, other=0.0)
        value += tl.load(value_ptr + slot * stride_value + at, mask=listed, other=0.0)
    else:
        value = tl.full((MOST,), float("-inf"), tl.float32)
    tl.store(spot, value, mask=listed)


def allow(
    logits: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor
) -> None:  # fmt: skip
    """Every token but the listed ones is out, in rows whose slot lists any. In place on float32
    [N, V]; slots int32 [N], counts int32 [S], ids int32 [S, most]: different ones in each slot.
    """
    rows, vocab = logits.shape
    most = ids.shape[1]
    held = torch.empty((rows, triton.next_power_of_2(most)), device=logits.device)
    _hold_kernel[(rows,)](
        logits, slots, counts, ids, held, logits.stride(0), ids.stride(0), MOST=held.shape[1]
    )
    block = min(4096, triton.next_power_of_2(vocab))
    _empty_kernel[(rows, triton.cdiv(vocab, block))](
        logits, slots, counts, vocab, logits.stride(0), BLOCK=block
    )
    _listed(logits, slots, counts, ids, held, slots, counts, 0)


def add(
    logits: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor,
    bias: torch.Tensor,
) -> None:  # fmt: skip
    """bias float32 [S, most] is added at the listed tokens; else as `allow`."""
    _listed(logits, slots, counts, ids, bias, slots, counts, 1)


def ban(
    logits: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor,
    positions: torch.Tensor, until: torch.Tensor,
) -> None:  # fmt: skip
    """The listed tokens are out while positions int64 [N] < until int32 [S]; else as `allow`."""
    _listed(logits, slots, counts, ids, logits, positions, until, 2)


def _listed(
    logits: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, ids: torch.Tensor,
    values: torch.Tensor, positions: torch.Tensor, until: torch.Tensor, how: int,
) -> None:  # fmt: skip
    if logits.shape[0]:
        _list_kernel[(logits.shape[0],)](
            logits, slots, counts, ids, values, positions, until, logits.stride(0), ids.stride(0),
            values.stride(0), MOST=triton.next_power_of_2(ids.shape[1]), HOW=how,
        )  # fmt: skip


def penalise(
    logits: torch.Tensor, slots: torch.Tensor, repetition: torch.Tensor, frequency: torch.Tensor,
    presence: torch.Tensor, prompt_mask: torch.Tensor, answer_counts: torch.Tensor,
) -> None:  # fmt: skip
    """In place on float32 [N, V]. slots int32 [N]: each row's place in the other tensors, which are
    float32 [S] (three), int32 [S, V / 32] with a bit for each token of the prompt, int32 [S, V].
    """
    rows, vocab = logits.shape
    block = min(4096, triton.next_power_of_2(vocab))
    exact = {"enable_fp_fusion": False} if logits.device.type == "cuda" else {}
    if rows:
        _penalise_kernel[(rows, triton.cdiv(vocab, block))](
            logits, slots, repetition, frequency, presence, prompt_mask, answer_counts, vocab,
            logits.stride(0), prompt_mask.stride(0), answer_counts.stride(0), BLOCK=block, **exact,
        )  # fmt: skip
