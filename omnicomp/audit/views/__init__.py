"""Views of one report: text, tree, why, HTML page, trace, JSON."""
