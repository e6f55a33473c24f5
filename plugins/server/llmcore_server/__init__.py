"""The HTTP server of llmcore: what `llmcore serve` runs. Authors of dialects import `llmcore_server.api`."""
