"""FlashInfer's paged prefill as its documentation states it, executable on a CPU.

Reads nothing but the arguments that the library reads: page arrays, masks, scale, window and soft cap. What
it computes is what our arguments mean. It is strict where the library is, or would silently read rubbish.
"""

from __future__ import annotations

from typing import Any

import torch


class PrefillDouble:
    """Stands for `flashinfer.BatchPrefillWithPagedKVCacheWrapper`, with its names, order and defaults."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND", "the double knows our layout only"
        assert backend == "fa2", "the only template that takes masks"
        self.plans: list[dict[str, Any]] = []
        self.num_runs = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        plan = {name: value for name, value in locals().items() if name != "self"}
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 and array.dim() == 1 for array in arrays)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
            row_counts = qo_indptr.diff()
            key_counts = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            assert custom_mask.shape == (int((row_counts * key_counts).sum()),)
        self.plans.append(plan)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = self.plans[-1]
        keys, values = paged_kv_cache
        shape = (plan["num_kv_heads"], plan["page_size"], plan["head_dim_qk"])
        assert keys.shape[1:] == values.shape[1:] == shape
        assert q.shape == (int(plan["qo_indptr"][-1]), plan["num_qo_heads"], plan["head_dim_qk"])
        assert q.is_contiguous()
        assert (q.dtype, keys.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert out is not None, "ours to allocate"
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        first_bit = 0
        for number in range(len(plan["qo_indptr"]) - 1):
            first_bit = self._sequence(number, first_bit, q, keys, values, out)
        self.num_runs += 1
        return out

    def _sequence(
        self,
        number: int,
        first_bit: int,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> int:
        """Attend for one sequence; returns where the next one's mask begins."""
        plan = self.plans[-1]
        first, end = plan["qo_indptr"][number : number + 2].tolist()
        first_page, end_page = plan["paged_kv_indptr"][number : number + 2].tolist()
        pages = plan["paged_kv_indices"][first_page:end_page].long()
        num_keys = (len(pages) - 1) * plan["page_size"] + int(plan["paged_kv_last_page_len"][number])
        num_rows, ratio = end - first, plan["num_qo_heads"] // plan["num_kv_heads"]

        def gather(pool: torch.Tensor) -> torch.Tensor:
            by_head = pool[pages].transpose(0, 1).flatten(1, 2)[:, :num_keys]
            return by_head.repeat_interleave(ratio, dim=0).float()

        scores = torch.einsum("qhd,hld->hql", q[first:end].float(), gather(keys))
        scale = plan["head_dim_qk"] ** -0.5 if plan["sm_scale"] is None else plan["sm_scale"]
        scores = scores * scale
        if plan["logits_soft_cap"]:
            scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
        row = torch.arange(num_rows)[:, None]
        key = torch.arange(num_keys)
        visible = torch.ones(num_rows, num_keys, dtype=torch.bool)
        if plan["custom_mask"] is not None:  # takes the place of the causal one
            visible = plan["custom_mask"][first_bit : first_bit + num_rows * num_keys].view(
                num_rows, num_keys
            )
        elif plan["causal"]:
            visible = key <= row + (num_keys - num_rows)
        if plan["window_left"] >= 0:
            visible = visible & (key + num_rows + plan["window_left"] >= num_keys + row)
        scores = scores.masked_fill(~visible, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out[first:end] = torch.einsum("hql,hld->qhd", weights, gather(values)).to(out.dtype)
        return first_bit + num_rows * num_keys


class Doubles:
    """Makes them, as the library's class would be called, and remembers which."""

    def __init__(self, kind: type[PrefillDouble] = PrefillDouble) -> None:
        self._kind = kind
        self.made: list[PrefillDouble] = []

    def __call__(self, *positional: Any, **named: Any) -> PrefillDouble:
        self.made.append(self._kind(*positional, **named))
        return self.made[-1]

    @property
    def num_plans(self) -> int:
        return sum(len(double.plans) for double in self.made)

    @property
    def num_runs(self) -> int:
        return sum(double.num_runs for double in self.made)
