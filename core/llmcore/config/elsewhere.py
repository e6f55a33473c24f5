"""Options of LightLLM and LMDeploy that this version does not have, or that change nothing here.

Every source of settings accepts these names, so that the error gives the reason and does not guess at a misspelt name.
A plugin may bring an option with such a name; then the name means the plugin's option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Elsewhere:
    """An option that is not a setting."""

    name: str
    why: str
    """The end of the sentence "... is not available in this version: "."""
    accepts: tuple[str, ...] = ()
    """Values that ask for the behaviour that this server has anyway."""
    idle: Mapping[str | None, str] = field(default_factory=dict)
    """Value that gets only a warning -> the reason in it; None stands for any value."""
    flag: bool = False
    multiple: bool = False


_ONE_GPU = "a model runs on one device"
_ONE_HOST = "a server runs on one host"
_NOT_SPLIT = "prefill and decode are not split over servers"
_NO_MEDIA = "requests hold text only"
_LOCAL = "models are directories of this machine and nothing is downloaded"
_NO_GROUP: Mapping[str | None, str] = {None: "a model runs on one device, so processes form no group"}

OPTIONS = (
    Elsewhere("tp", _ONE_GPU, accepts=("1",)),
    Elsewhere("dp", _ONE_GPU, accepts=("1",)),
    Elsewhere("nnodes", _ONE_HOST, accepts=("1",)),
    Elsewhere("node_rank", _ONE_HOST, accepts=("0",)),
    Elsewhere("nccl_host", _ONE_GPU, idle=_NO_GROUP),
    Elsewhere("nccl_port", _ONE_GPU, idle=_NO_GROUP),
    Elsewhere("multinode_httpmanager_port", _ONE_HOST),
    Elsewhere("multinode_router_gloo_port", _ONE_HOST),
    Elsewhere("use_config_server_to_init_nccl", _ONE_HOST, flag=True),
    Elsewhere("run_mode", _NOT_SPLIT, accepts=("normal",)),
    Elsewhere("pd_master_ip", _NOT_SPLIT),
    Elsewhere("pd_master_port", _NOT_SPLIT),
    Elsewhere("pd_decode_rpyc_port", _NOT_SPLIT),
    Elsewhere("config_server_host", _NOT_SPLIT),
    Elsewhere("config_server_port", _NOT_SPLIT),
    Elsewhere("enable_multimodal", _NO_MEDIA, flag=True),
    Elsewhere("cache_capacity", _NO_MEDIA),
    Elsewhere("cache_reserved_ratio", _NO_MEDIA),
    Elsewhere("vision_max_batch_size", _NO_MEDIA),
    Elsewhere("proxy_url", "a server registers nowhere; put a reverse proxy in front of it"),
    Elsewhere("revision", _LOCAL),
    Elsewhere("download_dir", _LOCAL),
    Elsewhere("adapters", "LoRA adapters are not applied; merge them into the weights", multiple=True),
    Elsewhere("quant_policy", "KV has the type of the weights", accepts=("0", "none")),
    Elsewhere("model_format", "only checkpoints in Hugging Face's layout and GGUF files are read", accepts=("hf",)),
    Elsewhere("max_prefill_iters", "--chunked_prefill_size says how a long prompt is cut into steps", accepts=("1",)),
    Elsewhere(
        "backend",
        "there is one engine",
        accepts=("pytorch",),
        idle={"turbomind": "there is one engine, which runs on torch"},
    ),
    Elsewhere(
        "cache_chunk_size",
        "it was never an option but a field of LMDeploy's engine config, by which its KV grew; KV is allocated once",
    ),
)
"""In the order of docs/options.md."""
