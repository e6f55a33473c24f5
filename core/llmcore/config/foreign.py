"""Options of other servers that are not settings here.

The options of LightLLM and LMDeploy have llmcore's own names, so every source of settings accepts them: the error
gives the reason and does not guess at a misspelt name. A value that asks for the
behaviour that this server has anyway is accepted.

An option of vLLM or SGLang is an error in every source, with any value. A value that fits there may be wrong here, and
a server that ignores the option is not what the operator asked for. An option that means exactly the
same under the same name (`--host`, `--port`, `--dtype`) is a setting.

A plugin may bring an option with such a name; then the name means the plugin's option.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.config.setting import FALSE, Setting, names, without_login

log = logging.getLogger("llmcore.config")

ELSEWHERE = "elsewhere"
"""The group of options that are not settings. A Config does not hold them."""


@dataclass(frozen=True, kw_only=True)
class Absent(Setting):
    """An option of LightLLM or LMDeploy that this version does not have, or that changes nothing here."""

    why: str
    """The end of the sentence "... is not available in this version: "."""
    accepts: tuple[str, ...] = ()
    """Values that ask for the behaviour that this server has anyway."""
    idle: Mapping[str | None, str] = field(default_factory=dict)
    """Value that gets only a warning -> the reason in it; None stands for any value."""

    def parse(self, raw: object, where: str) -> None:
        """Returns None, after a warning if the value has no effect. Raises ConfigError for an unavailable value."""
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        for item in items:
            text = str(item).strip()
            if text in self.accepts or (self.type is bool and text.lower() in FALSE):
                continue
            idle = self.idle.get(text, self.idle.get(None))
            if idle is None:
                given = where if self.type is bool or "\n" in text else f"{where} {without_login(text, text)}"
                raise ConfigError(f"{given} is not available in this version: {self.why}.")
            log.warning("%s has no effect: %s.", where if None in self.idle else f"{where} {text}", idle)


def absent_settings(among: Iterable[Setting]) -> tuple[Absent, ...]:
    """The options of ABSENT whose names are not in `among`."""
    taken = names(among)
    return tuple(option for option in ABSENT if option.name not in taken)


def _absent(name: str, why: str, *, flag: bool = False, **more: Any) -> Absent:
    return Absent(
        name=name,
        group=ELSEWHERE,
        type=bool if flag else str,
        summary=f"Not available in this version: {why}.",
        default=None,
        why=why,
        **more,
    )


_ONE_GPU = "a model runs on one device"
_ONE_HOST = "a server runs on one host"
_NOT_SPLIT = "prefill and decode are not split over servers"
_TEXT_ONLY = "requests hold text only"
_LOCAL = "a plugin that fetches models brings it, and none is active: pip install plugin-hub"
_NO_GROUP: Mapping[str | None, str] = {
    None: "the processes of --tp run on one host and meet in the server's own directory"
}

ABSENT: tuple[Absent, ...] = (
    _absent("nnodes", _ONE_HOST, accepts=("1",)),
    _absent("node_rank", _ONE_HOST, accepts=("0",)),
    _absent("nccl_host", _ONE_GPU, idle=_NO_GROUP),
    _absent("nccl_port", _ONE_GPU, idle=_NO_GROUP),
    _absent("multinode_httpmanager_port", _ONE_HOST),
    _absent("multinode_router_gloo_port", _ONE_HOST),
    _absent("use_config_server_to_init_nccl", _ONE_HOST, flag=True),
    _absent("run_mode", _NOT_SPLIT, accepts=("normal",)),
    _absent("pd_master_ip", _NOT_SPLIT),
    _absent("pd_master_port", _NOT_SPLIT),
    _absent("pd_decode_rpyc_port", _NOT_SPLIT),
    _absent("config_server_host", _NOT_SPLIT),
    _absent("config_server_port", _NOT_SPLIT),
    _absent("enable_multimodal", _TEXT_ONLY, flag=True),
    _absent("cache_capacity", _TEXT_ONLY),
    _absent("cache_reserved_ratio", _TEXT_ONLY),
    _absent("vision_max_batch_size", _TEXT_ONLY),
    _absent("revision", _LOCAL),
    _absent("download_dir", _LOCAL),
    _absent("adapters", "LoRA adapters are not applied; merge them into the weights", multiple=True),
    _absent("max_prefill_iters", "--chunked_prefill_size says how a long prompt is cut into steps", accepts=("1",)),
    _absent(
        "backend",
        "there is one engine",
        accepts=("pytorch",),
        idle={"turbomind": "there is one engine, which runs on torch"},
    ),
    _absent(
        "cache_chunk_size",
        "it was never an option but a field of LMDeploy's engine config, by which its KV grew; KV is allocated once",
    ),
)
"""The options of LightLLM and LMDeploy that are not settings, in the order of docs/options.md."""

_BOTH, _VLLM, _SGLANG = "vLLM and SGLang", "vLLM", "SGLang"

_INSTEAD: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "give --model_dir, the path of a directory or a GGUF file": {
        _BOTH: ("model",),
        _SGLANG: ("model_path",),
    },
    "give --model_name": {
        _BOTH: ("served_model_name",),
    },
    "leave it out: the tokenizer is the one beside the model": {
        _BOTH: ("tokenizer",),
        _SGLANG: ("tokenizer_path",),
    },
    "leave it out: /v1/completions takes token ids beside text": {
        _BOTH: ("skip_tokenizer_init",),
    },
    "give --tp, which counts the processes of all engines: this number times --dp": {
        _BOTH: ("tensor_parallel_size",),
        _SGLANG: ("tp_size",),
    },
    "give --kernel reduce_add_rms_norm=torch --kernel comm.all_reduce=nccl": {
        _BOTH: ("disable_custom_all_reduce",),
    },
    "leave it out: a server runs on one host, whose devices --tp and --dp divide": {
        _BOTH: ("pipeline_parallel_size", "enable_expert_parallel"),
        _VLLM: (
            "distributed_executor_backend",
            "data_parallel_backend",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_rank",
            "decode_context_parallel_size",
            "enable_eplb",
            "eplb_config",
            "headless",
        ),
        _SGLANG: (
            "pp_size",
            "ep_size",
            "ep",
            "expert_parallel_size",
            "enable_dp_attention",
            "enable_p2p_check",
            "enable_nccl_nvls",
            "load_balance_method",
            "moe_a2a_backend",
        ),
    },
    "give --dp, and with it --tp, which counts the processes of all engines": {
        _BOTH: ("data_parallel_size",),
        _SGLANG: ("dp_size",),
    },
    "leave it out: the checkpoint's config says how its weights are quantized": {
        _BOTH: ("quantization", "quantization_param_path"),
        _SGLANG: ("torchao_config", "modelopt_quant"),
    },
    "leave it out: KV has the type of the weights (--data_type)": {
        _BOTH: ("kv_cache_dtype",),
        _VLLM: ("calculate_kv_scales",),
    },
    "give --api_keys, or better the variable LLMCORE_API_KEYS": {
        _BOTH: ("api_key",),
        _SGLANG: ("admin_api_key",),
    },
    "leave it out: LoRA adapters are not applied; merge them into the weights": {
        _BOTH: ("enable_lora", "max_lora_rank"),
        _VLLM: (
            "lora_modules",
            "max_loras",
            "max_cpu_loras",
            "lora_dtype",
            "fully_sharded_loras",
            "enable_prompt_adapter",
        ),
        _SGLANG: ("lora_paths", "max_loras_per_batch", "lora_target_modules", "lora_backend"),
    },
    "leave it out: an installed plugin runs each family; `llmcore models` lists them": {
        _BOTH: ("model_impl",),
    },
    "leave it out: safetensors and GGUF files are read as they are": {
        _BOTH: ("model_loader_extra_config",),
    },
    "leave it out: requests hold text only": {
        _BOTH: ("limit_mm_per_prompt", "mm_processor_kwargs"),
        _VLLM: (
            "allowed_local_media_path",
            "allowed_media_domains",
            "disable_mm_preprocessor_cache",
            "mm_processor_cache_gb",
            "skip_mm_profiling",
            "language_model_only",
        ),
        _SGLANG: ("mm_attention_backend",),
    },
    "leave it out: the API says how many log-probabilities a request may ask for": {
        _BOTH: ("max_logprobs",),
    },
    "leave it out: metrics are always on, at /metrics": {
        _BOTH: ("enable_metrics",),
        _VLLM: ("enable_server_load_tracking", "show_hidden_metrics_for_version"),
        _SGLANG: (
            "show_time_cost",
            "bucket_time_to_first_token",
            "bucket_inter_token_latency",
            "enable_request_time_stats_logging",
        ),
    },
    "give --kernel op=name; `llmcore kernels --explain` lists what there is": {
        _BOTH: ("attention_backend", "enable_torch_compile"),
        _VLLM: ("disable_cascade_attn",),
        _SGLANG: (
            "sampling_backend",
            "decode_attention_backend",
            "prefill_attention_backend",
            "moe_runner_backend",
            "triton_attention_num_kv_splits",
            "torch_compile_max_bs",
            "enable_torch_compile_debug_mode",
        ),
    },
    "leave it out: every token is sent as soon as it is there": {
        _BOTH: ("stream_interval",),
    },
    "give --max_req_total_len": {
        _VLLM: ("max_model_len",),
        _SGLANG: ("context_length",),
    },
    "give --graph_max_batch_size, or --disable_cudagraph for none": {
        _VLLM: (
            "max_seq_len_to_capture",
            "max_context_len_to_capture",
            "cuda_graph_sizes",
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            "compilation_config",
        ),
        _SGLANG: ("disable_cuda_graph_padding",),
    },
    "give --disable_cudagraph": {
        _VLLM: ("enforce_eager",),
        _SGLANG: ("disable_cuda_graph",),
    },
    "give --mem_fraction": {
        _VLLM: ("gpu_memory_utilization",),
        _SGLANG: ("mem_fraction_static",),
    },
    "give --max_total_token_num, in tokens": {
        _VLLM: ("kv_cache_memory_bytes", "num_gpu_blocks_override"),
    },
    "give --cache_block_seq_len": {
        _VLLM: ("block_size",),
        _SGLANG: ("page_size",),
    },
    "leave it out: neither weights nor KV move to the host's memory or to a disk": {
        _VLLM: ("swap_space", "cpu_offload_gb", "kv_offloading_size"),
        _SGLANG: ("enable_hierarchical_cache", "hicache_ratio", "hicache_size", "hicache_storage_backend"),
    },
    "leave it out: prefill and decode are not split over servers": {
        _VLLM: ("kv_transfer_config", "kv_events_config"),
        _SGLANG: (
            "disaggregation_mode",
            "disaggregation_transfer_backend",
            "disaggregation_bootstrap_port",
            "disaggregation_ib_device",
        ),
    },
    "give --running_max_req_size": {
        _VLLM: ("max_num_seqs",),
        _SGLANG: ("max_running_requests",),
    },
    "give --batch_max_tokens, the tokens of one step": {
        _VLLM: ("max_num_batched_tokens",),
        _SGLANG: ("max_prefill_tokens", "prefill_max_requests", "prefill_only_one_req"),
    },
    "give --chunked_prefill_size": {
        _VLLM: ("max_num_partial_prefills",),
    },
    "give --chunked_prefill_size, the most prompt tokens of one request in a step": {
        _VLLM: ("long_prefill_token_threshold",),
    },
    "leave it out: chunked prefill is always on, and --disable_chunked_prefill turns it off": {
        _VLLM: ("enable_chunked_prefill",),
        _SGLANG: ("enable_mixed_chunk",),
    },
    "give --disable_chunked_prefill": {
        _VLLM: ("no_enable_chunked_prefill",),
    },
    "give --disable_dynamic_prompt_cache": {
        _VLLM: ("no_enable_prefix_caching",),
        _SGLANG: ("disable_radix_cache", "disable_chunked_prefix_cache"),
    },
    "leave it out: the prefix cache is always on, and --disable_dynamic_prompt_cache turns it off": {
        _VLLM: ("prefix_caching_hash_algo", "use_v2_block_manager"),
    },
    "give --scheduler; `llmcore plugins` lists the policies": {
        _VLLM: ("scheduling_policy", "scheduler_cls"),
        _SGLANG: ("schedule_policy", "enable_priority_scheduling", "schedule_low_priority_values_first"),
    },
    "leave it out: the next step is always planned while one runs": {
        _VLLM: ("async_scheduling", "num_scheduler_steps"),
        _SGLANG: ("disable_overlap_schedule",),
    },
    "give --router_max_wait_tokens": {
        _VLLM: ("scheduler_delay_factor",),
    },
    "leave it out: preempted requests are computed again": {
        _VLLM: ("preemption_mode",),
    },
    "leave it out: a request brings its own seed": {
        _VLLM: ("seed",),
        _SGLANG: ("random_seed",),
    },
    "leave it out: a model's files are of one revision, and none of them is code": {
        _VLLM: ("tokenizer_revision", "code_revision"),
    },
    "give --model_dir, which holds config.json": {
        _VLLM: ("hf_config_path",),
    },
    "change config.json in the model's directory": {
        _VLLM: ("hf_overrides", "rope_theta"),
        _SGLANG: ("json_model_override_args",),
    },
    "give --generation_config, with a file of sampling defaults": {
        _VLLM: ("override_generation_config",),
        _SGLANG: ("preferred_sampling_params",),
    },
    "leave it out: config.json and GGUF headers are read": {
        _VLLM: ("config_format",),
    },
    "leave it out: the model's architecture says what it serves": {
        _VLLM: ("task", "runner", "convert"),
        _SGLANG: ("is_embedding",),
    },
    "change config.json in the model's directory, or give --rope_scaling_factor": {
        _VLLM: ("rope_scaling",),
    },
    "give --httpserver_workers": {
        _VLLM: ("api_server_count",),
        _SGLANG: ("tokenizer_worker_num",),
    },
    "write a plugin; `llmcore hooks` lists what it can change": {
        _VLLM: ("worker_cls", "worker_extension_cls"),
    },
    "write a plugin; `llmcore hooks register_logits_processors` says how": {
        _VLLM: ("logits_processors", "logits_processor_pattern"),
        _SGLANG: ("enable_custom_logit_processor",),
    },
    "put a reverse proxy in front of the server": {
        _VLLM: ("middleware", "root_path"),
        _SGLANG: ("fastapi_root_path",),
    },
    "leave it out: there is no speculative decoding": {
        _VLLM: ("speculative_config", "speculative_model", "num_speculative_tokens"),
        _SGLANG: (
            "speculative_algorithm",
            "speculative_draft_model_path",
            "speculative_num_steps",
            "speculative_eagle_topk",
            "speculative_num_draft_tokens",
        ),
    },
    "leave it out: tools are read wherever --tool_call_parser names a parser or finds one": {
        _VLLM: ("enable_auto_tool_choice",),
    },
    "write a plugin, and name its parser with --tool_call_parser": {
        _VLLM: ("tool_parser_plugin",),
    },
    "write a plugin, and name its parser with --reasoning_parser": {
        _VLLM: ("reasoning_parser_plugin",),
    },
    "give --reasoning_parser; `auto` asks the chat template": {
        _VLLM: ("enable_reasoning",),
    },
    "leave it out: the model does not see tools it may not call": {
        _VLLM: ("exclude_tools_when_tool_choice_none",),
    },
    "install plugin-guided: it needs no option to choose a backend": {
        _VLLM: ("guided_decoding_backend", "structured_outputs_config"),
        _SGLANG: ("grammar_backend",),
    },
    "leave it out: a request says so, with whitespace_pattern": {
        _VLLM: ("guided_decoding_disable_any_whitespace",),
        _SGLANG: ("constrained_json_whitespace_pattern", "constrained_json_disable_any_whitespace"),
    },
    "leave it out: the chat template says what it reads": {
        _VLLM: ("chat_template_content_format",),
    },
    "leave it out: a request cannot bring a chat template": {
        _VLLM: ("trust_request_chat_template",),
    },
    "leave it out: answers have the role assistant": {
        _VLLM: ("response_role",),
    },
    "give it in the request": {
        _VLLM: ("return_tokens_as_token_ids",),
    },
    "give --allow_origins": {
        _VLLM: ("allowed_origins",),
    },
    "give --allow_methods": {
        _VLLM: ("allowed_methods",),
    },
    "give --allow_headers": {
        _VLLM: ("allowed_headers",),
    },
    "give --log_level": {
        _VLLM: ("uvicorn_log_level",),
        _SGLANG: ("log_level_http",),
    },
    "leave it out: requests are logged at --log_level DEBUG only": {
        _VLLM: ("disable_uvicorn_access_log", "disable_log_requests", "no_enable_log_requests"),
    },
    "give --log_level DEBUG, which logs prompts, and --max_log_len": {
        _VLLM: ("enable_log_requests", "enable_log_outputs"),
        _SGLANG: ("log_requests", "log_requests_level"),
    },
    "leave it out: one server process starts all others": {
        _VLLM: ("disable_frontend_multiprocessing",),
    },
    "leave it out: every answer has a header X-Request-Id": {
        _VLLM: ("enable_request_id_headers",),
    },
    "leave it out: usage always has prompt_tokens_details": {
        _VLLM: ("enable_prompt_tokens_details",),
    },
    "set stream_options.include_usage in the request": {
        _VLLM: ("enable_force_include_usage",),
    },
    "leave it out: there is no such route": {
        _VLLM: ("enable_tokenizer_info_endpoint",),
    },
    "leave it out: there are no traces; /metrics has the figures": {
        _VLLM: ("otlp_traces_endpoint", "collect_detailed_traces"),
    },
    "give --host and --port, and put a reverse proxy in front of the server": {
        _VLLM: ("uds",),
    },
    "put a reverse proxy that asks for certificates in front of the server": {
        _VLLM: ("ssl_ca_certs", "ssl_cert_reqs"),
    },
    "start the server again after a certificate has changed": {
        _VLLM: ("enable_ssl_refresh",),
    },
    "leave it out: a server keeps its weights loaded": {
        _VLLM: ("enable_sleep_mode",),
        _SGLANG: ("enable_memory_saver",),
    },
    "leave it out: a terminal shows how far loading is": {
        _VLLM: ("use_tqdm_on_load",),
    },
    "leave it out: the model's config says how far its attention reaches": {
        _VLLM: ("disable_sliding_window",),
    },
    "leave it out: each group of layers has a pool of its own": {
        _VLLM: ("disable_hybrid_kv_cache_manager",),
    },
    "write a plugin that brings its own options": {
        _VLLM: ("additional_config",),
    },
    "give --long_truncation_mode": {
        _SGLANG: ("allow_auto_truncate",),
    },
    "give --max_total_token_num": {
        _SGLANG: ("max_total_tokens",),
    },
    "give --max_waiting_requests": {
        _SGLANG: ("max_queued_requests",),
    },
    "give --length_estimator, or --router_token_ratio": {
        _SGLANG: ("schedule_conservativeness",),
    },
    "give --kv_manager; `llmcore plugins` lists the policies": {
        _SGLANG: ("radix_eviction_policy",),
    },
    "give --graph_max_batch_size": {
        _SGLANG: ("cuda_graph_max_bs", "cuda_graph_bs"),
    },
    "leave it out: a server runs on one host": {
        _SGLANG: ("dist_init_addr", "nccl_init_addr"),
    },
    "give --rank_timeout": {
        _SGLANG: ("dist_timeout",),
    },
    "choose the GPU with the variable CUDA_VISIBLE_DEVICES": {
        _SGLANG: ("base_gpu_id", "gpu_id_step"),
    },
    "give --deterministic": {
        _SGLANG: ("enable_deterministic_inference",),
    },
    "give --watchdog_timeout": {
        _SGLANG: ("soft_watchdog_timeout",),
    },
    "give --log_stats_interval, in seconds": {
        _SGLANG: ("decode_log_interval",),
    },
    "leave it out: usage always has cached_tokens": {
        _SGLANG: ("enable_cache_report",),
    },
    "leave it out: there are no batches of files; `llmcore generate` answers a file of prompts": {
        _SGLANG: ("file_storage_path",),
    },
    "give --generation_config auto or none": {
        _SGLANG: ("sampling_defaults",),
    },
    "leave it out: clients call tools themselves": {
        _SGLANG: ("tool_server",),
    },
    "put the text around the prompt in the request": {
        _SGLANG: ("completion_template",),
    },
    "give --chat_template": {
        _SGLANG: ("hf_chat_template_name",),
    },
    "leave it out: the server speaks HTTP": {
        _SGLANG: ("grpc_mode",),
    },
    "leave it out: the server is ready when its start ends": {
        _SGLANG: ("skip_server_warmup", "warmups"),
    },
    "leave it out: an idle server waits without using a core": {
        _SGLANG: ("sleep_on_idle",),
    },
    "take the password off the key: openssl pkey -in KEY -out NEW": {
        _SGLANG: ("ssl_keyfile_password",),
    },
}
"""The fix -> the server -> its options that have this fix."""


FOREIGN: Mapping[str, tuple[str, str]] = {
    name: (whose, instead)
    for instead, options in _INSTEAD.items()
    for whose, named in options.items()
    for name in named
}
"""Option of vLLM or SGLang -> (the server that has it, the fix)."""

SHORT: Mapping[str, str] = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-asc": "api_server_count",
    "-q": "quantization",
    "-O": "compilation_config",
    "-cc": "compilation_config",
}
"""vLLM's short spellings."""


def foreign(name: str) -> str | None:
    """The end of an error about an option, after the place where it was given; None for a name not in the table.

    `name` is canonical, and not the name of a setting.
    """
    if name not in FOREIGN:
        return None
    whose, instead = FOREIGN[name]
    return f"is an option of {whose}; {instead}."
