from simulated import in_process, shared_sim, sim

__all__ = ["in_process", "shared_sim", "sim"]
