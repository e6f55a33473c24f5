"""Until the real one is merged."""

import sys
import types
from dataclasses import dataclass
from typing import Any

from llmcore.api import ConfigError

try:
    import llmcore_quantization.linear  # noqa: F401
except ImportError:
    module: Any = types.ModuleType("llmcore_quantization.linear")

    @dataclass
    class Quantized:
        scheme: Any

    def op_of(scheme: Any) -> str:
        if scheme.inputs == "plain":
            return "linear.w4a16" if scheme.codes == "u4" else "linear.w8a16"
        if scheme.codes != "u4" and not (scheme.zeros or scheme.ordered):
            if scheme.inputs in ("row", "static") and scheme.group == 0:
                return "linear.w8a8"
            if scheme.inputs == "group" and scheme.group > 0 and scheme.codes == "e4m3":
                return "linear.fp8_block"
        raise ConfigError("no op")

    module.Quantized, module.op_of = Quantized, op_of
    sys.modules["llmcore_quantization.linear"] = module
