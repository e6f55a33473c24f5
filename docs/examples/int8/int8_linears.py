"""A quantization method that keeps int8 in memory: `X.weight` int8 with `X.weight_scale` f32 per row."""

from llmcore.api import QuantMethodSpec, hookimpl


@hookimpl
def register_quant_methods():
    yield QuantMethodSpec(name="int8-linears", make=f"{__name__}:Int8", reads=f"{__name__}:reads")


def reads(quantization):
    return quantization.get("quant_method") == "int8_linears"


class Int8:
    """protocols.QuantMethod. It uses the checkpoint's names, so it takes the checkpoint unchanged."""

    def __init__(self, quantization, config):
        self.linear_method = linear_method()

    def checkpoint(self, checkpoint):
        return checkpoint


def linear_method():
    import torch
    from llmcore.api import TOKEN_BUCKETS, Placement
    from llmcore.layers import DTYPES

    class Tensors:
        """layers.Bound: the tensors of one linear."""

        def __init__(self, shape, build):
            self.shape, self.found, row = shape, {}, 0
            parts = {}
            for name, rows in shape.parts.items():
                parts[name], row = (row, rows), row + rows
            by_row = (
                shape.shard if shape.shard and shape.shard.dim == 0 else None
            )  # a tensor without columns is not cut there
            whole, rows = (Placement(parts, cut, shape.replicated) for cut in (shape.shard, by_row))

            def add(name, dtype, place, *size):
                data = torch.empty(size, dtype=dtype, device=build.torch_device)
                self.found[name] = torch.nn.Parameter(data, requires_grad=False), place

            if shape.shared is None:
                add("weight", torch.int8, whole, shape.outputs, shape.inputs)
                add("weight_scale", torch.float32, rows, shape.outputs)
            if shape.bias:
                add("bias", DTYPES[build.config.dtype], rows, shape.outputs)

        def tensors(self):
            return self.found

        def bind(self):
            held = {name: parameter.data for name, (parameter, _) in self.found.items()}
            linear, bias, shared = torch.nn.functional.linear, held.get("bias"), self.shape.shared
            if shared is not None:  # the embedding's table, which is not quantized
                return (lambda x: linear(x, shared, bias),) * len(TOKEN_BUCKETS), frozenset()
            weight, scale = held["weight"], held["weight_scale"]

            def call(x):
                y = (linear(x.float(), weight.float()) * scale).to(x.dtype)
                return y if bias is None else y + bias

            return (call,) * len(TOKEN_BUCKETS), frozenset()

    class Linears:
        """layers.LinearMethod."""

        activations = frozenset()

        def create(self, shape, build):
            return Tensors(shape, build)

    return Linears()
