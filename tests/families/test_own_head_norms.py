"""A family's own norms of queries and keys may have the names that checkpoints give them."""

from __future__ import annotations

from pathlib import Path

from llmcore_devtools import registry_of
from llmcore_devtools.family import assert_family_matches_transformers

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "register_models.py"
NAMED = '''

class Named(Attention):
    """Norms that happen to do nothing, applied in `project`."""

    def __init__(self, build, spec, **parts):
        super().__init__(build, spec, **parts)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def project(self, x, step):
        qk, v = super().project(x, step)
        return self.k_norm(self.q_norm(qk)), v
'''


def test_norms_that_a_subclass_keeps_are_its_own(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert text.count("= Attention(") == 1
    (tmp_path / "named.py").write_text(text.replace("= Attention(", "= Named(") + NAMED)
    assert_family_matches_transformers("ArceeForCausalLM", registry=registry_of(str(tmp_path / "named.py")))
