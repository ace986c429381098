"""Choosing among lowerings for a whole graph: by rule (`tuned`), or by measuring (`measure`)."""
