"""A worker for tests of the pool, which needs no torch: it answers with what it is told to do."""

import os
import signal
import subprocess
import sys
import time

from omnicomp.backend.worker_pool import serve


def build(data: bytes) -> bytes:
    """Echo a message; `die` ends the process, `hang` starts another process and never answers."""
    if data == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    if data.startswith(b"hang "):
        child = subprocess.Popen(["sleep", "1000"])
        with open(data[5:].decode(), "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
        time.sleep(1000)
    return data


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), build)
