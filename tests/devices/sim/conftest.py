from simulated import in_process as in_process
from simulated import shared_sim as shared_sim
from simulated import sim as sim
