"""An API worker sends requests, an engine takes them, both through FastDeploy's names.

``python -m examples.fastdeploy`` runs both. Either may be there first.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import numpy as np

from examples.fastdeploy.engine_client import EngineClient
from examples.fastdeploy.engine_service import EngineService

LAST = "last_0"
_PATIENCE = 30.0
"""Seconds that the engine has to get everything."""


async def api() -> None:
    """The API worker: text, a picture, a request that is none, one that is aborted."""
    client = EngineClient()
    image = np.arange(1296 * 588, dtype=np.uint32).astype(np.uint8).reshape(1296, 588)
    await client.add_requests({"request_id": "text", "prompt_token_ids": [1, 2, 3], "n": 2})
    await client.add_requests(
        {"request_id": "picture", "prompt_token_ids": [4, 5], "multimodal_inputs": {"images": image}}
    )
    await client.add_requests({"request_id": "nonsense"})
    await client.add_requests({"request_id": "unwanted", "prompt_token_ids": [6]})
    await client.abort("unwanted")
    await client.add_requests({"request_id": "last", "prompt_token_ids": [7]})
    print("API: 6 requests sent, and one aborted", flush=True)
    # Closing the producer waits for the engine; what it has not done by then is kept for it.
    await client.close()


def engine() -> int:
    """The engine: takes all in, and runs them when the last one is there."""
    service = EngineService(lambda request_id, message, code: print(f"engine: {request_id}: {code}, {message}"))
    service.start_zmq_service()
    scheduler = service.scheduler
    deadline = time.monotonic() + _PATIENCE
    while not scheduler.waiting or scheduler.waiting[-1].request_id != LAST:
        if not service.is_receiving() or time.monotonic() > deadline:
            print(f"engine: no more is received: {service.failure}")
            return 1
        time.sleep(0.01)
    while (request := scheduler.get_request()) is not None:
        images = (request.multimodal_inputs or {}).get("images")
        seen = "" if images is None else f", a picture of {images.nbytes:,} bytes with mean {images.mean():.1f}"
        print(f"engine: {request.request_id}: {len(request.prompt_token_ids)} tokens{seen}")
        del request, images
    service._exit_sub_services()
    return 0


def main() -> int:
    """Both, in two processes, with a namespace of their own."""
    if sys.argv[1:] == ["engine"]:
        return engine()
    os.environ.setdefault("FMQ_NAMESPACE", f"example-{os.getpid()}")

    with subprocess.Popen([sys.executable, "-m", "examples.fastdeploy", "engine"]) as process:
        asyncio.run(api())
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
