"""The engine as a process of a server: its mailbox, the HTTP workers behind it, and admission."""
