"""What a thread that compiles is doing inside torch, read from its frames: nothing is wrapped or slowed down."""

import sys
from types import FrameType
from typing import Final

_COMPILER: Final = "waiting for the C++ compiler"
_WORKERS: Final = "waiting for Triton's compile workers"
_MEASURES: Final = "measuring kernels"

# File of torch, function (empty for any), what it does. The innermost frame that is listed decides.
_PLACES: Final = (
    ("torch/_inductor/cpp_builder.py", "", _COMPILER),
    ("torch/_inductor/async_compile.py", "wait", _WORKERS),
    ("torch/_inductor/async_compile.py", "_wait_futures", _WORKERS),
    ("torch/_inductor/codecache.py", "result", _WORKERS),
    ("torch/utils/_filelock.py", "", "waiting for a lock of another process"),
    ("torch/_inductor/select_algorithm.py", "do_autotuning", _MEASURES),
    ("torch/_inductor/select_algorithm.py", "benchmark_choices", _MEASURES),
    ("torch/_inductor/select_algorithm.py", "wait_on_futures", "compiling kernels to measure"),
    ("torch/_inductor/runtime/triton_heuristics.py", "benchmark_all_configs", _MEASURES),
    ("torch/_inductor/scheduler.py", "", "fusing and scheduling"),
    ("torch/_inductor/graph.py", "codegen", "generating code"),
    ("torch/_inductor/graph.py", "run_node", "lowering operators"),
    ("torch/_inductor/fx_passes/", "", "rewriting the graph"),
    ("torch/_inductor/codecache.py", "load_with_key", "looking into the compile cache"),
    ("torch/_inductor/codecache.py", "prepare_key", "looking into the compile cache"),
    ("torch/_functorch/partitioners.py", "", "parting forward and backward"),
    ("torch/_functorch/_aot_autograd/graph_capture.py", "", "tracing autograd"),
    ("torch/_functorch/_aot_autograd/graph_capture_wrappers.py", "", "tracing autograd"),
)


def waits_for(thread: int) -> str:
    """What a thread does inside torch now: `waiting for the C++ compiler`; empty if nothing is known of it."""
    frames = sys._current_frames()
    found = _place(frames.get(thread))
    if found == _WORKERS and any(_place(frame) == _COMPILER for id, frame in frames.items() if id != thread):
        return _COMPILER  # C++ is compiled by threads, for which the one that builds waits
    return found


def _place(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" in file:
            for part, function, said in _PLACES:
                if part in file and function in ("", frame.f_code.co_name):
                    return said
        frame = frame.f_back
    return ""
