"""A KV layout with its own attention: int8 with a scale per token and head, `--mode kv8`."""

from llmcore.api import KernelSpec, KVLayoutSpec, ModeSpec, Requires, hookimpl

LAYOUT = "int8-heads"


@hookimpl
def register_kv_layouts():
    yield KVLayoutSpec(name=LAYOUT, make=f"{__name__}:make")


@hookimpl
def register_kernels():
    """A kernel that is right everywhere and fast nowhere. Quick kernels are compared with it."""
    reads = Requires(device="cpu", layouts={LAYOUT})
    for op in ("attn.gqa.decode", "attn.gqa.prefill", "attn.gqa.mixed"):
        yield KernelSpec(op=op, name=LAYOUT, make=f"{__name__}:attention", when=reads)


@hookimpl
def register_modes():
    yield ModeSpec(name="kv8", layout=LAYOUT, summary="KV as int8, a scale per token and head")


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
                pool.index_copy_(0, slots, (new / scale[..., None]).round().to(torch.int8))
                scales.index_copy_(0, slots, scale)

        def gather(self, kv, slots):
            return tuple(
                (pool[slots] * scales[slots][..., None]).to(self.dtype)
                for pool, scales in zip(kv[:2], kv[2:], strict=True)
            )

    return Int8Layout(group, granule, dtype)


def attention(context):
    """The reference, on keys and values in the form of the layout `token`."""
    from llmcore.layers import ReferenceAttention

    class OverInt8(ReferenceAttention):
        layouts = (LAYOUT,)

        def run(self, q, k_new, v_new, kv, meta, out, lse=None):
            plain = tuple((pool * scales[..., None]).to(q.dtype) for pool, scales in zip(kv[:2], kv[2:], strict=True))
            return super().run(q, k_new, v_new, plain, meta, out, lse)

    return OverInt8(context)
