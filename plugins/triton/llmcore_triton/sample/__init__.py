"""From logits to tokens: op `sample`, one module per variant, and the ops of ranks that share a vocabulary, `best`,
`part` and `pick`. They share `peaks`, `numbers` and `draw`.

Every variant first writes the best score of each chunk of each row (`peaks`) to a place of its own. So no sum depends
on timing. Later kernels read these few numbers first. Chunks are the same for every batch, and a draw has the same
bits in every variant.
"""
