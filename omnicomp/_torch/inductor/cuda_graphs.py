"""Torch's trees of CUDA graphs (`cudagraph_trees`) where what is held is never overwritten.

Torch begins a generation with each call of a compiled function, and takes the memory of the one before from whoever
still holds it. These trees have no generations: a recording whose tensors live is followed by another one in memory of
its own, as torch does within a generation, and a tree begins anew once nothing of it is held.

They are a manager beside torch's own, so that functions compiled with `mode="reduce-overhead"` are not touched.
"""

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch._C import _storage_Use_Count
from torch._inductor.cudagraph_trees import (
    CompilationMode,
    CUDAGraphNode,
    CUDAGraphTreeManager,
    CUDAWarmupNode,
    get_cudagraph_segments,
    is_live,
)
from torch._inductor.cudagraph_utils import FunctionID, WrappedFunction

from omnicomp._torch.inductor.recordable import Boxed, Piece
from omnicomp._torch.repairs.first_replay import first_replay_waits
from omnicomp.safety.forks import new_lock

_LEAST_BYTES: Final = 256 << 20  # that the process may need more with recordings, however little it needed

_MODES: Final = {
    "forward": CompilationMode.FORWARD,
    "backward": CompilationMode.BACKWARD,
    "inference": CompilationMode.INFERENCE,
}


class Trees(CUDAGraphTreeManager):
    """The recordings of one device, in one memory pool.

    Attributes:
        lock: held during a call that may record or replay.
        work: how many warm-ups and recordings there were: calls that were slower than a plain one.
        plain: how many calls torch's manager left unrecorded, as it does where memory of the program is written to.
        failure: why nothing can be recorded any more; empty if it can.
        users: whose recordings are replayed, or may be.
    """

    def __init__(self, device_index: int) -> None:
        super().__init__(device_index)
        self.lock = threading.Lock()  # not reentrant: a graph that another one's operator calls runs plainly
        self.work = 0
        self.plain = 0
        self.failure = ""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pointers: set[int] = set()
        self._thread: weakref.ref[threading.Thread] | None = None
        self._used_on = torch._C._cuda_getCurrentRawStream(device_index)  # `current_stream` makes an object
        self._recording = False
        self._ran = False  # whether the call that is being made got as far as the program's code, or a replay
        self._inputs: list[Any] | None = None  # of a warm-up or a recording that is being made, or where they lie
        self._copied: set[FunctionID] = set()  # whose outputs are all copied when they return

    def can_start_new_generation(self) -> bool:
        """Never: a tree ends when nothing of it is held."""
        return False

    def check_warn_on_unable_to_start_executing(self, function_id: FunctionID) -> None:
        """Torch warns of what is the rule here."""

    def refuses(self, part: str) -> str:
        """Why a call must not use the recordings now; empty if it may."""
        if self.failure:
            return self.failure
        if torch._C._cuda_getCurrentRawStream(self.device_index) != self._used_on:
            return "it is called on another stream than the recordings"
        if part != "backward":  # which autograd calls in a thread of its own
            owner, thread = self._thread and self._thread(), threading.current_thread()
            if isinstance(thread, threading._DummyThread):  # type: ignore[attr-defined]
                return "it is called in a thread of autograd, or one that Python did not start"
            if owner is None or not owner.is_alive():
                self._thread = weakref.ref(thread)
            elif owner is not thread:
                return "it is called in another thread than the recordings"
        return ""

    def recorded(self, piece: Piece, model: Boxed) -> Boxed:
        """The function, which is warmed up in its first call, recorded in its second, and replayed in others."""
        returned: list[Sequence[Any]] = []  # by a warm-up

        def counted(inputs: list[Any]) -> Sequence[Any]:
            self.plain += 1
            self._ran = True
            outputs = model(inputs)
            if not self._recording:
                returned.append(outputs)
            return outputs

        id = self.new_func_id()
        self.ids_to_stack_traces[id] = None
        placeholders: Any = piece.placeholders
        self.ids_to_funcs[id] = WrappedFunction(
            counted, list(piece.static), id, piece.constants, placeholders, piece.mutated
        )
        self.id_to_mode[id] = _MODES[piece.part]
        self.id_to_compile_id[id] = None
        if piece.part == "backward" and piece.whole:
            self._copied.add(id)
        run = functools.partial(self.run, function_id=id)

        def call(inputs: list[Any]) -> Sequence[Any]:
            if self.failure:
                return model(inputs)
            torch._C._set_cached_tensors_enabled(True)  # torch's own reset ends it for all trees
            self._ran, self._inputs = False, None
            try:
                return run(inputs)
            except Exception as error:
                if self._ran and not (self._recording or returned):
                    raise  # a warm-up, of which the error is the program's, or a replay
                self._recording = False
                self.failure = f"recording failed: {str(error).partition(chr(10))[0]}"
                # Torch's check of the pool may come behind a warm-up. What is recorded does not run: all is in place.
                if returned:
                    return returned[0]
                return model(inputs if self._inputs is None else list(map(_rebuilt, self._inputs)))
            finally:
                returned.clear()
                self._inputs = None

        return call

    def _keep(self, inputs: list[Any], function_id: FunctionID) -> None:
        """Keep what is emptied on the way, should nothing be recorded in the end.

        No recording may write over what its caller may go on to hold. A backward's caller drops what its forward saved
        while it runs, and memory that is needed next takes its place; only where it lies is kept.
        """
        backward = self.id_to_mode[function_id] is CompilationMode.BACKWARD
        self._inputs = [self._place(value) if backward else value for value in inputs]

    def _place(self, value: Any) -> Any:
        """What a tensor in the pool can be rebuilt from without holding it; the value itself if it is none."""
        if not isinstance(value, torch.Tensor) or not self.owns(value.untyped_storage().data_ptr()):
            return value
        return _Place(CUDAGraphNode._tensor_metadata(value, ignore_storage_offset=False))

    def record_function(self, new_inputs: list[Any], function_id: FunctionID) -> Any:
        """Record, and note which memory is the pool's."""
        self._recording = True
        self.plain -= 1
        self._keep(new_inputs, function_id)
        with first_replay_waits():
            outputs = super().record_function(new_inputs, function_id)
        self._recording = False
        if isinstance(self.current_node, CUDAGraphNode):
            _hold_what_autograd_holds(self.current_node, copied=function_id in self._copied)
        self._note()
        return outputs

    def run_eager(self, new_inputs: list[Any], function_id: FunctionID) -> Any:
        """Warm up, and note which memory is the pool's."""
        self.plain -= 1
        self._keep(new_inputs, function_id)
        outputs = super().run_eager(new_inputs, function_id)
        self._note()
        return outputs

    def execute_node(self, node: CUDAGraphNode, new_inputs: list[Any]) -> Any:
        """Replay."""
        self._ran = True
        return super().execute_node(node, new_inputs)

    def _note(self) -> None:
        self.work += 1
        node = self.current_node
        if isinstance(node, (CUDAGraphNode, CUDAWarmupNode)):
            self._pointers.update(ref.data_ptr() for ref in node.outputs_weakrefs if ref is not None)

    def owns(self, address: int) -> bool:
        """Whether memory belongs to the pool, by the address where its storage begins."""
        return address in self._pointers

    def shutdown(self) -> None:
        """Let go of all recordings."""
        # Torch's own reset, which may come first, ends the caching of tensors for these trees, too.
        torch._C._set_cached_tensors_enabled(True)
        super().shutdown()

    def bytes_held(self) -> int:
        """Size of the pool."""
        return sum(segment["total_size"] for segment in get_cudagraph_segments(self.cuda_graphs_thread_pool))

    def over_budget(self, expected: int, limit: int | None) -> str:
        """Why recordings must not hold so much memory; empty if they may.

        Without a limit, the process may need a tenth more with them than it did without, or a hundredth of the
        device's memory if that is more. And what it has needed must fit beside them, should it run something else.

        Args:
            expected: bytes that they will hold at least, before a graph is recorded; 0 for those that they hold.
            limit: the bytes that they may hold.
        """
        device = self.device_index
        segments = get_cudagraph_segments(self.cuda_graphs_thread_pool)
        pool = sum(segment["total_size"] for segment in segments)
        held = expected or pool
        if limit is not None:
            return f"recordings would hold {held} bytes, and may hold {limit}" if held > limit else ""
        held = max(held, pool)
        outside = torch.cuda.memory_allocated(device) - sum(segment["allocated_size"] for segment in segments)
        need = _needs.setdefault(device, _Need())
        if expected:
            need.most = max(need.most, torch.cuda.max_memory_allocated(device) - pool)
            need.outside = outside
        else:
            need.outside = min(need.outside, outside)
        more = need.outside + held - need.most
        free, total = torch.cuda.mem_get_info(device)
        allowed = max(need.most // 10, total // 100, _LEAST_BYTES)
        if more > allowed:
            return f"with recordings the program would need {more} bytes more than it did, and may need {allowed} more"
        if need.most + held > free + torch.cuda.memory_reserved(device):
            return f"the {need.most} bytes that the program has needed do not fit beside {held} bytes of recordings"
        return ""

    def live(self) -> bool:
        """Whether anybody holds a tensor of the pool."""
        return self.current_node is not None and not self.current_node.all_outputs_are_dead()

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream, for times between two."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device_index))
        return event


@dataclasses.dataclass
class _Need:
    """What the process needs on a device, in bytes.

    Attributes:
        most: the most that it has needed without recordings.
        outside: the least beside them since a graph was first recorded. There is more for a while, as where a part of
            a step runs plainly, and holds what it saves outside of the pool.
    """

    most: int = 0
    outside: int = 0


_needs: Final[dict[int, _Need]] = {}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a tensor lay, in torch's form."""

    metadata: dict[str, Any]


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, _Place):
        return value
    found = value.metadata
    storage = torch._C._construct_storage_from_data_pointer(found["data_ptr"], found["device"], found["nbytes"])
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(found, storage)


def _hold_what_autograd_holds(node: CUDAGraphNode, *, copied: bool) -> None:
    """Have a recording's tensors live as long as autograd saves them.

    Torch, 2.11 and 2.13, takes a reference of C++'s for its own, so that a tensor that nobody but autograd holds is
    dead to it. That does no harm to generations, which end whoever holds their tensors.

    Args:
        node: the recording, which was just made.
        copied: whether nobody can hold its own outputs, as they are all copied, so that it need not be asked.
    """
    made = weakref.ref(node)
    own = len(node.path_weakrefs) - 1
    asked = [(depth, index) for depth, index in node.live_indices_after_graph if not (copied and depth == own)]

    def initialize() -> None:
        found = made()
        assert found is not None
        CUDAGraphNode._initialize_cached_tensors(found)
        for index, reference in enumerate(found.outputs_weakrefs):
            if reference is not None and reference.extra_ref_check is not None:
                reference.extra_ref_check = functools.partial(held_once, found.cached_tensor_outputs, index)

    def all_dead() -> bool:
        found = made()
        return found is None or all_are_dead(found.path_weakrefs[depth][index] for depth, index in asked)

    node._initialize_cached_tensors = initialize  # type: ignore[method-assign]
    node.all_outputs_are_dead = all_dead  # type: ignore[method-assign]


def all_are_dead(references: Iterable[Any]) -> bool:
    """Whether nobody holds any of the tensors; torch asks each by itself, which takes four times as long.

    A step of training asks for each saved tensor and each gradient.

    Args:
        references: torch's `StorageWeakRefWrapper`, or None.
    """
    for reference in references:
        check = reference and reference.extra_ref_check
        if check is None:
            if is_live(reference):
                return False
            continue
        tensors, index = check.args
        tensor = tensors[index]  # one more reference
        if tensor._use_count() > 1 or sys.getrefcount(tensor) > 3 or _storage_Use_Count(reference.ref.cdata) > 2:
            return False
    return True


def held_once(tensors: Sequence[Any], index: int) -> bool:
    """Whether nobody but a list holds one of its tensors, neither in Python nor in C++."""
    return tensors[index]._use_count() == 1 and sys.getrefcount(tensors[index]) == 2  # the list's, and the call's


_trees: Final[weakref.WeakValueDictionary[int, Trees]] = weakref.WeakValueDictionary()
_retired: Final[list[Trees]] = []
_making: Final = new_lock()


def capturing() -> bool:
    """Whether the program records a CUDA graph of its own now."""
    return torch.cuda.is_current_stream_capturing()


def trees_of(device: int) -> Trees:
    """The trees of a device, which live as long as what they record."""
    found = _trees.get(device)
    if found is not None and not found.failure:
        return found
    with _making:
        found = _trees.get(device)
        if found is None or found.failure:
            if found is not None:
                retire(found)
            found = _trees[device] = Trees(device)
        return found


def retire(trees: Trees) -> None:
    """Have new recordings begin in a new pool; the memory of the old one is freed when nothing of it is held."""
    _trees.pop(trees.device_index, None)
    trees.failure = trees.failure or "the recordings were dropped"
    if trees.live():
        _retired.append(trees)
    else:
        trees.shutdown()


def release_retired() -> None:
    """Free the memory of pools that were dropped while a tensor of theirs was held, and of which none is held now.

    Not while the program captures a CUDA graph of its own, into which nothing of this belongs.
    """
    if _retired and not capturing():
        with _making:
            for each in [each for each in _retired if not each.live()]:
                _retired.remove(each)
                each.shutdown()


def reset() -> None:
    """Forget all recordings."""
    for trees in list(_trees.values()):
        retire(trees)
