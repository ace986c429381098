from pathlib import Path

import pytest
import torch

from omnicomp import timeline
from omnicomp.cli.verify import run_verify
from omnicomp.errors import OmnicompError
from omnicomp.passes import certificates
from omnicomp.timeline import Certified


def attention(q: torch.Tensor) -> torch.Tensor:
    return (q @ q.transpose(-2, -1) / 8**0.5).softmax(-1) @ q


def timeline_of(folder: Path, certify: str) -> Path:
    file = folder / "run.jsonl"
    torch.compiler.reset()
    options = {"lowerings": ["eager"], "certify": certify, "timeline": str(file)}
    torch.compile(attention, backend="omni", options=options)(torch.randn(2, 4, 6, 8))
    return file


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))


def test_what_a_timeline_tells_of_is_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = timeline_of(tmp_path, "new")
    assert run_verify(file) == 0
    assert capsys.readouterr().out.count("proved") == 2
    for event in timeline.events():
        if isinstance(event, Certified):
            certificates.STORE.remove(event.key)
    assert run_verify(file) == 0
    assert "not checked" in capsys.readouterr().out


def test_a_timeline_without_certificates_is_an_error_that_says_what_to_do(tmp_path: Path):
    with pytest.raises(OmnicompError, match="no certificate"):
        run_verify(timeline_of(tmp_path, "off"))
