"""What the dtype pass is made of: classes of operators, rules, analysis of a graph, and its rewrite."""
