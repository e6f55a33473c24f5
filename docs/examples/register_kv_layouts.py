"""A KV layout that stores keys and values as f16 for any dtype of the model. It needs half of f32's memory."""

from llmcore.api import KVLayoutSpec, hookimpl


@hookimpl
def register_kv_layouts():
    yield KVLayoutSpec(name="token-f16", make=f"{__name__}:make")


def make(group, granule, dtype):
    """Returns the layout of one KV group. torch is imported when a model is built, not when plugins are listed."""
    import torch
    from llmcore.layers import Layout

    class F16Layout(Layout):
        @property
        def bytes(self):
            per_token = group.kv_heads * (group.key_size + group.value_size) * 2
            return per_token * granule * len(group.layers)

        def layer_tensors(self, granules, device):
            slots, heads = granules * granule, group.kv_heads
            sizes = (group.key_size, group.value_size)
            return tuple(torch.zeros(slots, heads, size, dtype=torch.float16, device=device) for size in sizes)

        def write(self, kv, slots, k, v):
            for pool, new in zip(kv, (k, v), strict=True):
                stored = new.half()
                pool.index_copy_(0, slots, stored)
                new.copy_(stored)  # attention of this step sees what later steps will see

        def gather(self, kv, slots):
            return tuple(pool.index_select(0, slots).to(self.dtype) for pool in kv)

    return F16Layout(group, granule, dtype)
