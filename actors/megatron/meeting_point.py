# pyright: basic
"""Where the ranks find each other."""

import datetime

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__


def open_store(host: str, *, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """Start the store on a free port (``port`` 0: for rank 0), or connect to it.

    The system picks the port while it is bound, so no other process can take it in between.
    """
    return TCPStore(
        host,
        port,
        world_size,
        is_master=port == 0,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
