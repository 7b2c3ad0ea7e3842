"""A rank started by hand says whom it waits for."""

from __future__ import annotations

import socket

import pytest

from modelwright.engine import distributed
from modelwright.engine.distributed import init_distributed
from modelwright.errors import PeerLost


def test_a_rank_that_waits_says_for_whom(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        port = str(unused.getsockname()[1])
        names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(distributed, "WAIT_NOTICE_SECONDS", 0.01)
        with pytest.raises(PeerLost, match="rank 1 of 2: rendezvous failed"), init_distributed(3.0):
            raise AssertionError("nobody listens")
    assert f"rank 1 of 2 waits for rank 0 and the others at 127.0.0.1:{port}" in capfd.readouterr().err
