from llmcore_devtools import registry_of
from llmcore_devtools.conformance import check_plugin
from llmcore_devtools.family import assert_family_matches_transformers

ALONE = registry_of("demo")


def test_what_we_contribute_keeps_the_contracts():
    assert check_plugin(ALONE, "demo")["register_kernels"] == 1


def test_granite_gives_the_tokens_that_transformers_gives():
    factors = {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    assert_family_matches_transformers("GraniteForCausalLM", registry=ALONE, logits_scaling=1.5, **factors)
