"""`python -m llmcore.cli`: the same as the command `llmcore`."""

from llmcore.cli import main

main()
