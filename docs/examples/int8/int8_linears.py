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
        pass

    def checkpoint(self, checkpoint, device):
        self.stored = checkpoint.sizes()
        return checkpoint

    def method_for(self, modules):
        """A linear stacks several modules (q, k and v). The scales tell which are quantized, if weights are there."""
        quantized = all(f"{module}.weight_scale" in self.stored for module in modules)
        return linear_method() if quantized or not self.stored else None

    def expert_method(self, modules):
        """Experts are not quantized."""
        return


def linear_method():
    import torch
    from llmcore.api import TOKEN_BUCKETS
    from llmcore.layers import DTYPES, fill_normal

    class Tensors:
        """layers.Bound: the tensors of one linear."""

        def __init__(self, shape, build):
            self.found = {}

            def add(name, dtype, place, *size):
                data = torch.empty(size, dtype=dtype, device=build.torch_device)
                self.found[name] = torch.nn.Parameter(data, requires_grad=False), place

            add("weight", torch.int8, shape.placement(), shape.outputs, shape.inputs)
            add("weight_scale", torch.float32, shape.placement(columns=False), shape.outputs)
            if shape.bias:
                add("bias", DTYPES[build.config.dtype], shape.placement(columns=False), shape.outputs)

        def tensors(self):
            return self.found

        def bind(self):
            held = {name: parameter.data for name, (parameter, _) in self.found.items()}
            weight, scale, bias = held["weight"], held["weight_scale"], held.get("bias")

            def call(x):
                y = (torch.nn.functional.linear(x.float(), weight.float()) * scale).to(x.dtype)
                return y if bias is None else y + bias

            return (call,) * len(TOKEN_BUCKETS), frozenset()

        def fill_dummy(self, name, tensor, generator):
            if name == "weight":
                tensor.random_(-127, 128, generator=generator)
            elif name == "weight_scale":
                tensor.fill_(0.02 / 73)  # 73 is the standard deviation of the codes
            else:
                fill_normal(name, tensor, generator)

    class Linears:
        """layers.LinearMethod."""

        activations = frozenset()
        multiples = (1, 1)

        def create(self, shape, build):
            return Tensors(shape, build)

    return Linears()
