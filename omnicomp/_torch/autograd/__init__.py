"""AOTAutograd: decompositions, partitions, operators traced through, and calls of operators."""
