"""A stand-in for ssh: runs the command on this machine, in a session and an environment of its own.

It is to ssh what matters for the launcher: both pipes go through it, the command does not see its environment
and starts in another folder, and when it is killed the command lives on without a peer. It leaves its pid in
`ssh-HOST`, and that of the command in `far-HOST`. KVSTORE_TEST_GREETING is what the login shell says.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path


def pump(source: int, target: int) -> None:
    while data := os.read(source, 1 << 16):
        while data:
            data = data[os.write(target, data) :]
    os.close(target)


def main() -> None:
    *_, host, command = sys.argv
    greeting = os.environ.get("KVSTORE_TEST_GREETING", "")
    shell = f"printf '%s' '{greeting}'; {command}"
    kept = {"PATH": os.environ["PATH"], "HOME": "/", "KVSTORE_TEST_MARK": os.environ["KVSTORE_TEST_MARK"]}
    far = subprocess.Popen(
        ["/bin/sh", "-c", shell],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept, cwd="/", start_new_session=True,
    )  # fmt: skip
    assert far.stdin is not None
    assert far.stdout is not None
    Path(f"argv-{host}").write_text("\n".join(sys.argv))
    Path(f"ssh-{host}").write_text(str(os.getpid()))
    Path(f"far-{host}").write_text(str(far.pid))
    incoming, outgoing = os.dup(far.stdin.fileno()), far.stdout.fileno()
    far.stdin.close()
    threading.Thread(target=pump, args=(0, incoming), daemon=True).start()
    pump(outgoing, 1)
    sys.exit(far.wait() if far.wait() >= 0 else 255)


if __name__ == "__main__":
    main()
