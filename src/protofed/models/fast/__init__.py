"""Speed made by hand: memory layouts, convolutions as products of matrices, folded normalisation."""
