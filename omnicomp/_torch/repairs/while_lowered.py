"""The repairs that are in force while Inductor lowers a graph and generates its code."""

import contextlib
from collections.abc import Generator

from omnicomp._torch.inductor.eager_kernels import eager_kernels_called
from omnicomp._torch.inductor.order_of_errors import errors_in_order
from omnicomp._torch.inductor.shared_code import calls_compared
from omnicomp._torch.inductor.vec_isa import isas_tested_lazily
from omnicomp._torch.repairs.body_inputs import inputs_kept
from omnicomp._torch.repairs.captured_buffers import captured_computed
from omnicomp._torch.repairs.cudnn_plans import one_layout_of_gradients
from omnicomp._torch.repairs.local_buffers import row_of_its_own
from omnicomp._torch.repairs.lowered_dtypes import dtypes_of_the_graph
from omnicomp._torch.repairs.moved_constructors import constructors_moved
from omnicomp._torch.repairs.read_before_written import read_before_written
from omnicomp._torch.repairs.rounded_casts import casts_rounded
from omnicomp._torch.repairs.scheduler_order import written_before_read
from omnicomp._torch.repairs.vector_functions import accurate_functions
from omnicomp._torch.repairs.written_while_read import read_before_overwritten


@contextlib.contextmanager
def inductor_repaired() -> Generator[None]:
    """Inside, Inductor is without the faults that are repaired in its own IR; on whatever thread."""
    with inputs_kept(), read_before_written(), written_before_read(), errors_in_order(), row_of_its_own():
        with (
            accurate_functions(),
            casts_rounded(),
            captured_computed(),
            one_layout_of_gradients(),
            eager_kernels_called(),
            read_before_overwritten(),
            dtypes_of_the_graph(),
            calls_compared(),
            constructors_moved(),
            isas_tested_lazily,
        ):
            yield
