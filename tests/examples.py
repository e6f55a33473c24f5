"""The number of examples of slow property tests."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """`count` examples, and a third of them for each mutant of scripts/mutants.sh: most wrong changes fail early."""
    return settings(max_examples=count // 3 if settings.get_current_profile_name() == "mutants" else count)
