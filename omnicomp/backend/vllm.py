"""vLLM's `CompilerInterface`: omni compiles the pieces of a model that vLLM serves.

`VLLM_PLUGINS=omni vllm serve …` is all that a user types. vLLM loads `plugin` in each of its processes, which puts
`OmniAdaptor` where vLLM looks for the compiler of its platform. Written for vLLM 0.33; the modes of vLLM that call
`torch.compile` by name take `backend="omni"` without it.
"""

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, cast

from torch.fx import GraphModule

from omnicomp._torch.dynamo import late_compile, saving
from omnicomp._torch.fx import copy_module, describe
from omnicomp._torch.inductor import store
from omnicomp._torch.inductor.frozen import inductor_settings
from omnicomp.analysis.hashes import exact_hash
from omnicomp.backend.artefacts import fingerprint
from omnicomp.backend.pipeline import omni
from omnicomp.backend.saved import SavedGraph
from omnicomp.errors import SaveError
from omnicomp.lowerings.overrides.registry import registered
from omnicomp.safety.privacy import logger

log = logger("omnicomp")

_INTERFACE: Final = "vllm.compilation.compiler_interface"


def _interface() -> Any:
    """VLLM's module, or None without vLLM; vLLM itself imports this one, so that it is loaded by then."""
    if importlib.util.find_spec("vllm") is None:
        return None
    return importlib.import_module(_INTERFACE)


_vllm: Final = _interface()
_triton_folders: Final[list[str]] = []  # that adaptors chose: those of one model are not for the next
_Base: Any = object if _vllm is None else _vllm.CompilerInterface


class OmniAdaptor(_Base):
    """What vLLM calls for each piece of a model, and each range of sizes.

    Attributes:
        name: under which vLLM's cache lists what was compiled.
    """

    name = "omni"

    def __init__(self) -> None:
        """Make an adaptor without a cache folder."""
        self._folder: Path | None = None
        self._built: dict[str, tuple[Callable[..., Any], Any]] = {}
        self._loaded: dict[Path, Callable[..., Any]] = {}

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None:
        """Keep artefacts in the folder, and the compile caches beside it, so that one folder has all.

        Args:
            cache_dir: the folder of one part of the model.
            disable_cache: whether nothing is to be kept.
            prefix: the end of `cache_dir`, which another part does not share.
        """
        self._folder = None if disable_cache else Path(cache_dir)
        self._built.clear()
        self._loaded.clear()
        if not disable_cache:
            base = Path(cache_dir.removesuffix(prefix))
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / "inductor_cache")
            if os.environ.get("TRITON_CACHE_DIR") in (None, *_triton_folders):  # a user's stays as it is
                os.environ["TRITON_CACHE_DIR"] = str(base / "triton_cache")
                _triton_folders.append(str(base / "triton_cache"))

    def compute_hash(self, vllm_config: Any) -> str:
        """Of what changes code beside vLLM's own configuration: versions, sources, machine, overrides, settings."""
        known = (fingerprint(), sorted(item.name for item in registered()), inductor_settings())
        return hashlib.sha256(repr(known).encode()).hexdigest()[:16]

    def compile(
        self,
        graph: GraphModule,
        example_inputs: list[Any],
        compiler_config: Mapping[str, Any] | None,
        compile_range: Any = None,
        key: str | None = None,
    ) -> tuple[Callable[..., Any], Any]:
        """Compile a piece for a range of sizes; one that equals an earlier piece shares its function and its file.

        Args:
            graph: the piece, which stays as it is.
            example_inputs: fake tensors, with symbolic sizes for a range and with numbers for a single size.
            compiler_config: options of omni and of Inductor.
            compile_range: the sizes.
            key: the name of the artefact in the cache folder.

        Returns:
            A function of the graph's inputs, and what `load` takes; None in its place if the piece can't be kept.
        """
        options = dict(compiler_config or {})
        if _vllm is not None and hasattr(_vllm, "set_inductor_config"):
            _vllm.set_inductor_config(options, compile_range)  # what vLLM tunes single sizes by
        eager, piece, same = copy_module(graph), copy_module(graph), ""

        def build(fakes: Sequence[Any]) -> Any:
            nonlocal same
            for node in piece.graph.nodes:
                node.meta.pop("example_value", None)  # of Dynamo's mode, with symbolic sizes also for a single size
            describe(piece, fakes)
            same = _identity(piece, options)
            return None if same in self._built else omni(piece, fakes, options=options)

        with nullcontext() if self._folder is None else saving.bundled():
            compiled, sizes = late_compile.compile_late(late_compile.scene_of(example_inputs), build)
        if same in self._built:
            return self._built[same]
        call, handle = cast(Callable[..., Any], compiled), None
        if sizes.holds is not None:
            log.warning("omni: a piece is right where %s, and runs eager elsewhere", sizes.text)
            call = _checked(call, sizes.holds, eager)
        elif self._folder is not None and key is not None:
            handle = self._save(call, key)
        if same:
            self._built[same] = call, handle
        return call, handle

    def load(
        self,
        handle: Any,
        graph: GraphModule,
        example_inputs: list[Any],
        graph_index: int,
        compile_range: Any = None,
    ) -> Callable[..., Any]:
        """What `compile` returned, from its file.

        Raises:
            SaveError: it can't be read, or something else made it.
        """
        if self._folder is None:
            raise SaveError("the cache is off: call initialize_cache with a folder first")
        path = self._folder / handle[0]
        if path not in self._loaded:
            try:
                data = path.read_bytes()
            except OSError as error:
                raise SaveError(f"the artefact {path} can't be read ({error.strerror}): remove the folder") from None
            self._loaded[path] = SavedGraph.deserialize_compile_artifacts(data)
        return self._loaded[path]

    def _save(self, compiled: Callable[..., Any], key: str) -> tuple[str, str] | None:
        assert self._folder is not None
        if not isinstance(compiled, SavedGraph):
            return None  # it runs eager as a whole
        try:
            data = SavedGraph.serialize_compile_artifacts(compiled)
        except SaveError as error:
            log.warning("omni: %s", error)
            return None
        path = self._folder / key
        store.write_whole(path, data, None)
        return key, str(path)


def _identity(piece: GraphModule, options: Mapping[str, Any]) -> str:
    """Equal for pieces that the same code is right for; empty if there may be none such."""
    if any(node.op == "call_module" for node in piece.graph.nodes) or piece.graph.find_nodes(op="get_attr"):
        return ""
    return f"{exact_hash(list(piece.graph.nodes))} {sorted((name, repr(value)) for name, value in options.items())}"


def _checked(call: Callable[..., Any], holds: Callable[[Any], bool], eager: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: call(*args) if holds(args) else eager(*args)


def plugin() -> None:
    """Have vLLM compile with omni; called by vLLM, and without effect unless `VLLM_PLUGINS` names `omni`."""
    if "omni" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    # vLLM's own format of whole models, the default from torch 2.12 on, holds artefacts of Inductor alone.
    os.environ.setdefault("VLLM_USE_MEGA_AOT_ARTIFACT", "0")
    platform: Any = type(importlib.import_module("vllm.platforms").current_platform)
    platform.get_compile_backend = classmethod(lambda cls: f"{__name__}.{OmniAdaptor.__name__}")
