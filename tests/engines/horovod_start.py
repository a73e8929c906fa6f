"""Start the processes of a Horovod job and let each end as it does; horovodrun ends all if one fails.

    python tests/engines/horovod_start.py 2 COMMAND ...

Exit code: that of the last process that failed. The Python needs Horovod's launcher, not its core.
"""

from __future__ import annotations

import os
import sys

import start
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def main() -> int:
    size = int(sys.argv[1])
    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))

    def variables(rank: int) -> dict[str, str]:
        place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        meeting = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
        kind = {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "HOSTNAME": "localhost"}
        all_of_them = {**place, "CROSS_RANK": 0, "CROSS_SIZE": 1, **meeting, **kind}
        return {f"HOROVOD_{name}": str(value) for name, value in all_of_them.items()}

    return start.run(size, sys.argv[2:], variables)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the server's thread may be slow to end
