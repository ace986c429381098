from simulated import shared_sim, sim

__all__ = ["shared_sim", "sim"]
