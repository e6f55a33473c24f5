"""Options of vLLM and SGLang, each with its name here or the reason why llmcore has no such option.

An option that means exactly the same under the same name (`--host`, `--port`, `--dtype`) is a setting and not in this
table. All others are an error on the command line, in the file and in the environment. A value that fits there may be
wrong here, and a server that ignores it is not what the operator asked for. A plugin may bring an option with such a
name; then the name means the plugin's option.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_ONE_DEVICE = "leave it out: a model runs on one device"
_TP = "give --tp, of which there is only 1 in this version: a model runs on one device"
_DP = "give --dp, of which there is only 1 in this version: a model runs on one device"
_GRAPHS = "give --graph_max_batch_size, or --disable_cudagraph for none"
_LENGTH = "give --max_req_total_len"
_BATCH = "give --batch_max_tokens, the tokens of one step"
_RUNNING = "give --running_max_req_size"
_NAME = "give --model_name"
_MODEL = "give --model_dir, the path of a directory or a GGUF file"
_KEYS = "give --api_keys, or better the variable LLMCORE_API_KEYS"
_KERNELS = "give --kernel op=name; `llmcore kernels --explain` lists what there is"
_WEIGHTS = "leave it out: the checkpoint's config says how its weights are quantized"
_KV = "leave it out: KV has the type of the weights (--data_type)"
_ALWAYS_CHUNKED = "leave it out: chunked prefill is always on, and --disable_chunked_prefill turns it off"
_ALWAYS_CACHED = "leave it out: the prefix cache is always on, and --disable_dynamic_prompt_cache turns it off"
_NO_LORA = "leave it out: LoRA adapters are not applied; merge them into the weights"
_NO_DRAFT = "leave it out: there is no speculative decoding"
_NO_MEDIA = "leave it out: requests hold text only"
_NO_OFFLOAD = "leave it out: neither weights nor KV move to the host's memory or to a disk"
_NO_SPLIT = "leave it out: prefill and decode are not split over servers"
_LOCAL = "leave it out: models are directories of this machine, and nothing is downloaded"
_BESIDE = "leave it out: the tokenizer is the one beside the model"
_GUIDED = "install plugin-guided: it needs no option to choose a backend"
_PARSER = "give --tool_call_parser; `auto` asks the chat template"
_REASONING = "give --reasoning_parser; `auto` asks the chat template"
_PER_REQUEST = "leave it out: a request brings its own seed"
_POLICY = "give --scheduler; `llmcore plugins` lists the policies"
_METRICS = "leave it out: metrics are always on, at /metrics"
_PROMPTS = "give --log_level DEBUG, which logs prompts, and --max_log_len"
_QUIET = "leave it out: requests are logged at --log_level DEBUG only"
_ALONE = "leave it out: one server process starts all others"
_GENERATION = "give --generation_config, with a file of sampling defaults"

_BOTH: Mapping[str, str] = {
    "model": _MODEL,
    "served_model_name": _NAME,
    "tokenizer": _BESIDE,
    "skip_tokenizer_init": "leave it out: /v1/completions takes token ids beside text",
    "tensor_parallel_size": _TP,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _DP,
    "enable_expert_parallel": _ONE_DEVICE,
    "disable_custom_all_reduce": _ONE_DEVICE,
    "quantization": _WEIGHTS,
    "quantization_param_path": _WEIGHTS,
    "kv_cache_dtype": _KV,
    "api_key": _KEYS,
    "enable_lora": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "model_impl": "leave it out: an installed plugin runs each family; `llmcore models` lists them",
    "model_loader_extra_config": "leave it out: safetensors and GGUF files are read as they are",
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "max_logprobs": "leave it out: the API says how many log-probabilities a request may ask for",
    "enable_metrics": _METRICS,
    "attention_backend": _KERNELS,
    "enable_torch_compile": _KERNELS,
    "stream_interval": "leave it out: every token is sent as soon as it is there",
}

_VLLM: Mapping[str, str] = {
    "max_model_len": _LENGTH,
    "max_seq_len_to_capture": _GRAPHS,
    "max_context_len_to_capture": _GRAPHS,
    "cuda_graph_sizes": _GRAPHS,
    "cudagraph_capture_sizes": _GRAPHS,
    "max_cudagraph_capture_size": _GRAPHS,
    "compilation_config": _GRAPHS,
    "enforce_eager": "give --disable_cudagraph",
    "gpu_memory_utilization": "give --mem_fraction",
    "kv_cache_memory_bytes": "give --max_total_token_num, in tokens",
    "num_gpu_blocks_override": "give --max_total_token_num, in tokens",
    "block_size": "give --cache_block_seq_len",
    "swap_space": _NO_OFFLOAD,
    "cpu_offload_gb": _NO_OFFLOAD,
    "kv_offloading_size": _NO_OFFLOAD,
    "kv_transfer_config": _NO_SPLIT,
    "kv_events_config": _NO_SPLIT,
    "max_num_seqs": _RUNNING,
    "max_num_batched_tokens": _BATCH,
    "max_num_partial_prefills": "give --chunked_prefill_size",
    "long_prefill_token_threshold": "give --chunked_prefill_size, the most prompt tokens of one request in a step",
    "enable_chunked_prefill": _ALWAYS_CHUNKED,
    "no_enable_chunked_prefill": "give --disable_chunked_prefill",
    "no_enable_prefix_caching": "give --disable_dynamic_prompt_cache",
    "prefix_caching_hash_algo": _ALWAYS_CACHED,
    "scheduling_policy": _POLICY,
    "scheduler_cls": _POLICY,
    "async_scheduling": "leave it out: the next step is always planned while one runs",
    "num_scheduler_steps": "leave it out: the next step is always planned while one runs",
    "scheduler_delay_factor": "give --router_max_wait_tokens",
    "preemption_mode": "leave it out: preempted requests are computed again",
    "seed": _PER_REQUEST,
    "tokenizer_revision": _LOCAL,
    "code_revision": _LOCAL,
    "hf_token": _LOCAL,
    "hf_config_path": _LOCAL,
    "hf_overrides": "change config.json in the model's directory",
    "override_generation_config": _GENERATION,
    "config_format": "leave it out: config.json and GGUF headers are read",
    "task": "leave it out: the model's architecture says what it serves",
    "runner": "leave it out: the model's architecture says what it serves",
    "convert": "leave it out: the model's architecture says what it serves",
    "rope_scaling": "change config.json in the model's directory, or give --rope_scaling_factor",
    "rope_theta": "change config.json in the model's directory",
    "calculate_kv_scales": _KV,
    "distributed_executor_backend": _ONE_DEVICE,
    "data_parallel_backend": _ONE_DEVICE,
    "data_parallel_size_local": _ONE_DEVICE,
    "data_parallel_address": _ONE_DEVICE,
    "data_parallel_rpc_port": _ONE_DEVICE,
    "data_parallel_rank": _ONE_DEVICE,
    "decode_context_parallel_size": _ONE_DEVICE,
    "enable_eplb": _ONE_DEVICE,
    "eplb_config": _ONE_DEVICE,
    "headless": _ONE_DEVICE,
    "api_server_count": "give --httpserver_workers",
    "worker_cls": "write a plugin; `llmcore hooks` lists what it can change",
    "worker_extension_cls": "write a plugin; `llmcore hooks` lists what it can change",
    "logits_processors": "write a plugin; `llmcore hooks register_logits_processors` says how",
    "logits_processor_pattern": "write a plugin; `llmcore hooks register_logits_processors` says how",
    "middleware": "put a reverse proxy in front of the server",
    "root_path": "put a reverse proxy in front of the server",
    "speculative_config": _NO_DRAFT,
    "speculative_model": _NO_DRAFT,
    "num_speculative_tokens": _NO_DRAFT,
    "lora_modules": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_cpu_loras": _NO_LORA,
    "lora_dtype": _NO_LORA,
    "fully_sharded_loras": _NO_LORA,
    "enable_prompt_adapter": _NO_LORA,
    "allowed_local_media_path": _NO_MEDIA,
    "allowed_media_domains": _NO_MEDIA,
    "disable_mm_preprocessor_cache": _NO_MEDIA,
    "mm_processor_cache_gb": _NO_MEDIA,
    "skip_mm_profiling": _NO_MEDIA,
    "language_model_only": _NO_MEDIA,
    "enable_auto_tool_choice": "leave it out: tools are read wherever --tool_call_parser names a parser or finds one",
    "tool_parser_plugin": "write a plugin, and name its parser with --tool_call_parser",
    "reasoning_parser_plugin": "write a plugin, and name its parser with --reasoning_parser",
    "enable_reasoning": _REASONING,
    "exclude_tools_when_tool_choice_none": "leave it out: the model does not see tools it may not call",
    "guided_decoding_backend": _GUIDED,
    "guided_decoding_disable_any_whitespace": "leave it out: a request says so, with whitespace_pattern",
    "structured_outputs_config": _GUIDED,
    "chat_template_content_format": "leave it out: the chat template says what it reads",
    "trust_request_chat_template": "leave it out: a request cannot bring a chat template",
    "response_role": "leave it out: answers have the role assistant",
    "return_tokens_as_token_ids": "give it in the request",
    "allowed_origins": "give --allow_origins",
    "allowed_methods": "give --allow_methods",
    "allowed_headers": "give --allow_headers",
    "uvicorn_log_level": "give --log_level",
    "disable_uvicorn_access_log": _QUIET,
    "disable_log_requests": _QUIET,
    "no_enable_log_requests": _QUIET,
    "enable_log_requests": _PROMPTS,
    "enable_log_outputs": _PROMPTS,
    "disable_frontend_multiprocessing": _ALONE,
    "enable_request_id_headers": "leave it out: every answer has a header X-Request-Id",
    "enable_server_load_tracking": _METRICS,
    "enable_prompt_tokens_details": "leave it out: usage always has prompt_tokens_details",
    "enable_force_include_usage": "set stream_options.include_usage in the request",
    "enable_tokenizer_info_endpoint": "leave it out: there is no such route",
    "otlp_traces_endpoint": "leave it out: there are no traces; /metrics has the figures",
    "collect_detailed_traces": "leave it out: there are no traces; /metrics has the figures",
    "show_hidden_metrics_for_version": _METRICS,
    "uds": "give --host and --port, and put a reverse proxy in front of the server",
    "ssl_ca_certs": "put a reverse proxy that asks for certificates in front of the server",
    "ssl_cert_reqs": "put a reverse proxy that asks for certificates in front of the server",
    "enable_ssl_refresh": "start the server again after a certificate has changed",
    "enable_sleep_mode": "leave it out: a server keeps its weights loaded",
    "use_tqdm_on_load": "leave it out: a terminal shows how far loading is",
    "disable_sliding_window": "leave it out: the model's config says how far its attention reaches",
    "disable_cascade_attn": _KERNELS,
    "disable_hybrid_kv_cache_manager": "leave it out: each group of layers has a pool of its own",
    "additional_config": "write a plugin that brings its own options",
    "use_v2_block_manager": _ALWAYS_CACHED,
}

_SGLANG: Mapping[str, str] = {
    "model_path": _MODEL,
    "tokenizer_path": _BESIDE,
    "context_length": _LENGTH,
    "allow_auto_truncate": "give --long_truncation_mode",
    "mem_fraction_static": "give --mem_fraction",
    "max_total_tokens": "give --max_total_token_num",
    "max_running_requests": _RUNNING,
    "max_queued_requests": "give --max_waiting_requests",
    "max_prefill_tokens": _BATCH,
    "prefill_max_requests": _BATCH,
    "page_size": "give --cache_block_seq_len",
    "schedule_policy": _POLICY,
    "enable_priority_scheduling": _POLICY,
    "schedule_low_priority_values_first": _POLICY,
    "schedule_conservativeness": "give --length_estimator, or --router_token_ratio",
    "enable_mixed_chunk": _ALWAYS_CHUNKED,
    "disable_radix_cache": "give --disable_dynamic_prompt_cache",
    "disable_chunked_prefix_cache": "give --disable_dynamic_prompt_cache",
    "radix_eviction_policy": "give --kv_manager; `llmcore plugins` lists the policies",
    "enable_hierarchical_cache": _NO_OFFLOAD,
    "hicache_ratio": _NO_OFFLOAD,
    "hicache_size": _NO_OFFLOAD,
    "hicache_storage_backend": _NO_OFFLOAD,
    "disable_cuda_graph": "give --disable_cudagraph",
    "disable_cuda_graph_padding": _GRAPHS,
    "cuda_graph_max_bs": "give --graph_max_batch_size",
    "cuda_graph_bs": "give --graph_max_batch_size",
    "disable_overlap_schedule": "leave it out: the next step is always planned while one runs",
    "tp_size": _TP,
    "pp_size": _ONE_DEVICE,
    "dp_size": _DP,
    "ep_size": _ONE_DEVICE,
    "ep": _ONE_DEVICE,
    "expert_parallel_size": _ONE_DEVICE,
    "enable_dp_attention": _ONE_DEVICE,
    "enable_p2p_check": _ONE_DEVICE,
    "enable_nccl_nvls": _ONE_DEVICE,
    "dist_init_addr": "leave it out: a server runs on one host",
    "nccl_init_addr": "leave it out: a server runs on one host",
    "dist_timeout": "leave it out: a server runs on one host",
    "base_gpu_id": "choose the GPU with the variable CUDA_VISIBLE_DEVICES",
    "gpu_id_step": "choose the GPU with the variable CUDA_VISIBLE_DEVICES",
    "load_balance_method": _ONE_DEVICE,
    "random_seed": _PER_REQUEST,
    "enable_deterministic_inference": "give --deterministic",
    "soft_watchdog_timeout": "give --watchdog_timeout",
    "tokenizer_worker_num": "give --httpserver_workers",
    "log_level_http": "give --log_level",
    "log_requests": _PROMPTS,
    "log_requests_level": _PROMPTS,
    "show_time_cost": _METRICS,
    "decode_log_interval": "give --log_stats_interval, in seconds",
    "prefill_only_one_req": _BATCH,
    "bucket_time_to_first_token": _METRICS,
    "bucket_inter_token_latency": _METRICS,
    "enable_request_time_stats_logging": _METRICS,
    "enable_cache_report": "leave it out: usage always has cached_tokens",
    "file_storage_path": "leave it out: there are no batches of files; `llmcore generate` answers a file of prompts",
    "admin_api_key": _KEYS,
    "is_embedding": "leave it out: the model's architecture says what it serves",
    "json_model_override_args": "change config.json in the model's directory",
    "preferred_sampling_params": _GENERATION,
    "sampling_defaults": "give --generation_config auto or none",
    "sampling_backend": _KERNELS,
    "decode_attention_backend": _KERNELS,
    "prefill_attention_backend": _KERNELS,
    "mm_attention_backend": _NO_MEDIA,
    "moe_runner_backend": _KERNELS,
    "moe_a2a_backend": _ONE_DEVICE,
    "triton_attention_num_kv_splits": _KERNELS,
    "torch_compile_max_bs": _KERNELS,
    "enable_torch_compile_debug_mode": _KERNELS,
    "torchao_config": _WEIGHTS,
    "modelopt_quant": _WEIGHTS,
    "grammar_backend": _GUIDED,
    "constrained_json_whitespace_pattern": "leave it out: a request says so, with whitespace_pattern",
    "constrained_json_disable_any_whitespace": "leave it out: a request says so, with whitespace_pattern",
    "tool_server": "leave it out: clients call tools themselves",
    "enable_custom_logit_processor": "write a plugin; `llmcore hooks register_logits_processors` says how",
    "completion_template": "put the text around the prompt in the request",
    "hf_chat_template_name": "give --chat_template",
    "fastapi_root_path": "put a reverse proxy in front of the server",
    "grpc_mode": "leave it out: the server speaks HTTP",
    "skip_server_warmup": "leave it out: the server is ready when its start ends",
    "warmups": "leave it out: the server is ready when its start ends",
    "speculative_algorithm": _NO_DRAFT,
    "speculative_draft_model_path": _NO_DRAFT,
    "speculative_num_steps": _NO_DRAFT,
    "speculative_eagle_topk": _NO_DRAFT,
    "speculative_num_draft_tokens": _NO_DRAFT,
    "lora_paths": _NO_LORA,
    "max_loras_per_batch": _NO_LORA,
    "lora_target_modules": _NO_LORA,
    "lora_backend": _NO_LORA,
    "disaggregation_mode": _NO_SPLIT,
    "disaggregation_transfer_backend": _NO_SPLIT,
    "disaggregation_bootstrap_port": _NO_SPLIT,
    "disaggregation_ib_device": _NO_SPLIT,
    "enable_memory_saver": "leave it out: a server keeps its weights loaded",
    "sleep_on_idle": "leave it out: an idle server waits without using a core",
    "ssl_keyfile_password": "take the password off the key: openssl pkey -in KEY -out NEW",
}

FOREIGN: Mapping[str, tuple[str, str]] = {
    **{name: ("vLLM and SGLang", tail) for name, tail in _BOTH.items()},
    **{name: ("vLLM", tail) for name, tail in _VLLM.items()},
    **{name: ("SGLang", tail) for name, tail in _SGLANG.items()},
}
"""Name -> (the server that has the option, the fix)."""

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


def foreign(name: str, known: Collection[str]) -> str | None:
    """The end of an error about an option, after the place where it was given; None for a name not in the table.

    `name` is canonical. `known`: the names of settings, which are not an error.
    """
    if name in known or name not in FOREIGN:
        return None
    whose, instead = FOREIGN[name]
    return f"is an option of {whose}; {instead}."
