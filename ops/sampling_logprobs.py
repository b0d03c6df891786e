"""Raw logprobs: log-softmax of the model's own logits, and the most likely tokens in one order.

Neither depends on how many alternatives were asked for, nor on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] of any float dtype -> float32 [N, V], each row by the same operations in the same
    order.
    """
    if logits.device.type == "cuda":
        from ops.kernels.triton import logprobs as triton

        return triton.log_softmax(logits)
    x = logits.to(torch.float32)
    if x.device.type == "cpu":
        from ops.kernels.cpu import load

        out: torch.Tensor = load().log_softmax(x)
        return out
    return torch.log_softmax(x, dim=-1)


def of_logits(
    logits: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gather` from the model's own logits [N, V] of any float dtype: the same bits, and on CUDA
    without the row's other logprobs where only the token's own was asked for.
    """
    if logits.device.type == "cuda" and num_logprobs == 0:
        from ops.kernels.triton import logprobs as triton

        value, rank = triton.of_tokens(logits, token_ids)
        return token_ids.to(torch.int32).unsqueeze(-1), value.unsqueeze(-1), rank
    return gather(log_softmax(logits), num_logprobs, token_ids)


def _order(x: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within a row: larger for a larger value, and for a lower index
    where values tie.
    """
    bits = (x + 0.0).view(torch.int32).to(torch.int64)
    value = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(x.shape[-1], device=x.device)
    return (value << 32) | (0xFFFFFFFF - index)


def gather(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids int32 [N, k + 1], logprobs float32 [N, k + 1], rank int64 [N]) for logprobs [N, V],
    token_ids int64 [N].

    Column 0 is the given token, then the k most likely: logprob from high to low, token id from
    low to high on ties. The rank is the given token's place in that order, from 1.
    """
    if logprobs.device.type == "cpu":
        from ops.kernels.cpu import draw

        native = draw.load()
        if native:
            return native.top(logprobs, num_logprobs, token_ids)
    at = token_ids.unsqueeze(-1)
    if logprobs.device.type == "cuda" and num_logprobs == 0:
        from ops.kernels.triton.rank import rank as place

        return at.to(torch.int32), logprobs.gather(-1, at), place(logprobs, token_ids)
    key = _order(logprobs)
    rank = (key >= key.gather(-1, at)).sum(-1)
    k = min(num_logprobs, logprobs.shape[-1])
    top = 0xFFFFFFFF - (torch.topk(key, k, dim=-1).values & 0xFFFFFFFF)
    ids = torch.cat((at, top), dim=1)
    return ids.to(torch.int32), logprobs.gather(-1, ids), rank


def named(
    logprobs: torch.Tensor, tokens: Mapping[int, Sequence[int]], token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `gather`, with row i's alternatives `tokens[i]` in the caller's order; rows without any
    are padded (-inf).
    """
    n, width = logprobs.shape[0], max(len(t) for t in tokens.values())
    ids = torch.zeros((n, width + 1), dtype=torch.int64)
    valid = torch.zeros((n, width + 1), dtype=torch.bool)
    valid[:, 0] = True
    for row, alternatives in tokens.items():
        ids[row, 1 : len(alternatives) + 1] = torch.as_tensor(alternatives, dtype=torch.int64)
        valid[row, 1 : len(alternatives) + 1] = True
    ids, valid = ids.to(logprobs.device), valid.to(logprobs.device)
    ids[:, 0] = token_ids
    values = logprobs.gather(-1, ids).masked_fill(~valid, -torch.inf)
    key = _order(logprobs)
    rank = (key >= key.gather(-1, token_ids.unsqueeze(-1))).sum(-1)
    return ids.to(torch.int32), values, rank
