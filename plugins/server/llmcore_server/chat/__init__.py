"""Conversations, as every dialect that has them needs them: messages to a prompt, tools, events to an answer."""
