"""Hand-written speed-ups: memory layouts, convolutions as products of matrices, folded normalisation."""
