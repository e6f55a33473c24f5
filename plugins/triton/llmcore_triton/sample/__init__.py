"""From logits to tokens: op `sample`, a module per variant, and what they share in `peaks`, `numbers` and `draw`.

Every variant begins with the best score of each chunk of each row (`peaks`), written side by side so that nothing is
added up in an order that depends on timing. What comes after reads those few numbers first. Chunks are the same for
every batch, and a draw has the same bits in every variant.
"""
