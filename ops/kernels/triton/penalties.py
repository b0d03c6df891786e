"""Penalties where the counts lie on the device, by the arithmetic of ops/sampling_logits.py.

Each element by itself: one division or multiplication, then two times one multiplication and one
subtraction, every one rounded (contraction is off), so nothing depends on the other elements.
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
