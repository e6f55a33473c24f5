"""The commands of `llmcore-devtools`."""
