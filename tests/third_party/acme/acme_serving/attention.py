"""attn.gqa.decode in torch: every row padded to one length, a power of two, so that few graphs do for all lengths."""

import torch
from llmcore.layers import spec_of


class Decode:
    """llmcore.api.AttentionKernel, for one query token per row."""

    def __init__(self, context):
        self.spec, self.granule = spec_of(context), context.granule
        self.longest = 1

    def workspace(self, limits):
        """Nothing persists."""

    def plan(self, rows, into):
        """On the host, before the step: the padded length decides what is launched, so it is the graph's key."""
        longest = max(1, int(rows.kv_len.max()))
        if self.spec.window is not None:
            longest = min(longest, self.spec.window)
        self.longest = 1 << (longest - 1).bit_length()
        return str(self.longest)

    def run(self, q, k_new, v_new, kv, meta, out, lse=None):
        """q [R, heads, key_size] over the rows' KV -> out. Lengths and tables are only known to the device."""
        spec, rows, granule = self.spec, len(q), self.granule
        length = meta["kv_len"].long()[:, None]
        first = torch.zeros_like(length) if spec.window is None else (length - spec.window).clamp(min=0)
        tokens = first + torch.arange(self.longest, device=q.device)
        beyond = tokens >= length
        # past a row's end, its last token again: slots that no row holds may be NaN
        tokens = torch.minimum(tokens, length - 1).clamp(min=0)
        table = meta["table"].index_select(0, meta["request"])
        slots = table.gather(1, tokens // granule).long() * granule + tokens % granule
        keys, values = (pool[slots].float() for pool in kv)
        queries = q.float().reshape(rows, spec.kv_heads, -1, spec.key_size)
        scores = torch.einsum("rkgd,rlkd->rkgl", queries, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
        scores = scores.masked_fill(beyond[:, None, None], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        out.copy_(torch.einsum("rkgl,rlkd->rkgd", (scores - total).exp(), values).reshape(out.shape))
        if lse is not None:
            lse.copy_(total.reshape(lse.shape))
        return out


def make(context):
    """Called once per attention, layout, granule and token bucket."""
    return Decode(context)
