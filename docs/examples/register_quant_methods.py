"""A quantization method: it reads checkpoints with int8 weights and a scale per row as plain weights."""

from llmcore.api import QuantMethodSpec, hookimpl


@hookimpl
def register_quant_methods():
    yield QuantMethodSpec(
        name="int8-rows",
        make=f"{__name__}:Int8Rows",
        reads=f"{__name__}:reads",
        summary="quant_method int8_rows: a scale per row of every weight",
    )


def reads(quantization):
    """Must be cheap. It looks at the config's quantization_config."""
    return quantization.get("quant_method") == "int8_rows"


class Int8Rows:
    """protocols.QuantMethod."""

    def __init__(self, quantization, config):
        pass

    def checkpoint(self, checkpoint, device):
        return PlainRows(checkpoint)

    def method_for(self, modules):
        """A method that multiplies int8 itself would return an llmcore.layers.LinearMethod."""
        return

    def expert_method(self, modules):
        """The same for the experts of a mixture: an llmcore.layers.ExpertMethod."""
        return


class PlainRows:
    """protocols.Checkpoint over another one. It multiplies `X` by `X_scale`, one number per row, if that exists."""

    def __init__(self, inner):
        self.inner, self.config, self.generation_config = inner, inner.config, inner.generation_config

    def sizes(self):
        stored = self.inner.sizes()
        types = {name: "F32" if f"{name}_scale" in stored else dtype for name, (_, dtype) in stored.items()}
        return {name: (shape, types[name]) for name, (shape, _) in stored.items() if not name.endswith("_scale")}

    def tensors(self):
        scales = {name: read().clone() for name, read in self.inner.tensors() if name.endswith("_scale")}
        for name, read in self.inner.tensors():
            if f"{name}_scale" in scales:
                scale = scales[f"{name}_scale"].unsqueeze(1)
                yield name, lambda read=read, scale=scale: read().float() * scale
            elif name not in scales:
                yield name, read
