"""The name by which `TORCH_LOGS="omnicomp_graphs"` asks for the graph after each stage of omnicomp's compilations.

torch reads `TORCH_LOGS` before omnicomp is imported, and takes only names that it knows or can find as modules. This
module has nothing in it: the logger of this name is written to by `omnicomp.timeline.graph_dump`.
"""
