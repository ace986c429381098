"""Inductor: compiling a graph, its caches, its compilers, and what a build is waiting for."""
