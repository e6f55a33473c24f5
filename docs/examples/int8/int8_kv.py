"""A KV layout with its own attention: int8 with a scale per token and head, `--mode kv8`."""

from llmcore.api import KernelSpec, KVLayoutSpec, ModeSpec, Requires, hookimpl

LAYOUT = "int8-heads"


@hookimpl
def register_kv_layouts():
    yield KVLayoutSpec(name=LAYOUT, make=f"{__name__}:make")


@hookimpl
def register_kernels():
    """A kernel in the form of one that decodes the pool itself. It is fast nowhere; the torch reference is enough."""
    reads = Requires(device="cpu", layouts={LAYOUT})
    for op in ("attn.gqa.decode", "attn.gqa.prefill", "attn.gqa.mixed"):
        yield KernelSpec(op=op, name=LAYOUT, make=f"{__name__}:attention", when=reads)


@hookimpl
def register_modes():
    yield ModeSpec(name="kv8", layouts={"token": LAYOUT}, summary="KV as int8, a scale per token and head")


def make(group, granule, dtype):
    import torch
    from llmcore.layers import Layout

    class Int8Layout(Layout):
        @property
        def bytes(self):
            numbers, scales = group.key_size + group.value_size, 2 * 4
            return group.kv_heads * (numbers + scales) * granule * len(group.layers)

        def layer_tensors(self, granules, device):
            sizes = (granules * granule, group.kv_heads)
            numbers = (
                torch.zeros(*sizes, n, dtype=torch.int8, device=device) for n in (group.key_size, group.value_size)
            )
            return (*numbers, *(torch.zeros(sizes, device=device) for _ in "kv"))

        def write(self, kv, slots, k, v):
            for pool, scales, new in zip(kv[:2], kv[2:], (k, v), strict=True):
                scale = new.float().abs().amax(-1).clamp(min=1e-8) / 127
                numbers = (new / scale[..., None]).round().to(torch.int8)
                pool.index_copy_(0, slots, numbers)
                scales.index_copy_(0, slots, scale)
                new.copy_(numbers * scale[..., None])  # attention of this step sees what later steps will see

        def gather(self, kv, slots):
            return tuple(
                (pool[slots] * scales[slots][..., None]).to(self.dtype)
                for pool, scales in zip(kv[:2], kv[2:], strict=True)
            )

    return Int8Layout(group, granule, dtype)


def attention(context):
    """The reference, on keys and values in the form of the layout `token`."""
    from dataclasses import replace

    from llmcore.layers import ReferenceAttention

    class OverInt8(ReferenceAttention):
        def run(self, q, k_new, v_new, kv, meta, out, lse=None):
            plain = tuple((pool * scales[..., None]).to(q.dtype) for pool, scales in zip(kv[:2], kv[2:], strict=True))
            return super().run(q, k_new, v_new, plain, meta, out, lse)

    return OverInt8(replace(context, gather=None))
