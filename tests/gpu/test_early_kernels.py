"""Idle processes compile the configurations of a kernel into the cache that its own process reads."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_worker.subproc_pool import SubprocPool

import omnicomp as omnicomp
from omnicomp._torch.inductor import early_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def rotated(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, :, None].float() / (10000 ** (torch.arange(0, 64, 2, device=x.device).float() / 64))
    both = torch.cat([angles, angles], -1)
    half = torch.cat([-x[..., 32:], x[..., :32]], -1)
    turned = x * both.cos().to(x.dtype)[:, None] + half * both.sin().to(x.dtype)[:, None]
    return turned.transpose(-1, -2).contiguous(), turned


def test_what_they_compile_is_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own, helped, submit = set[str](), set[str](), SubprocPool.submit

    def noting(pool: SubprocPool, job: Any, *args: Any) -> Any:
        future = submit(pool, job, *args)
        if len(args) == 3:  # a kernel
            future.add_done_callback(
                lambda done: (helped if ".configs[:0:-1]" in args[0].args[1] else own).update(_hashes(done))
            )
        return future

    monkeypatch.setattr(SubprocPool, "submit", noting)
    monkeypatch.setattr(early_kernels, "_SLOW", 0.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    x = torch.randn(1, 512, 16, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    positions = torch.arange(512, device="cuda")[None]
    with torch._inductor.config.patch(compile_threads=8):  # type: ignore[attr-defined]
        AsyncCompile.wait_pool_ready()
        found = torch.compile(rotated, backend="omni")(x, positions)
    for one, other in zip(found, rotated(x, positions), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert len(helped) > 1
    assert helped <= own


def _hashes(done: Future[Any]) -> list[str]:
    return [result.kernel.hash for result in done.result()[0].compile_results]
