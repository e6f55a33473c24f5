"""What is here is built, installed and run by scripts/check_third_party.py, in an environment of its own."""

collect_ignore_glob = ["*"]
