"""Run by test_foreign_ray.py: `drafthouse serve --address` on a Ray that was started without knowing of it.

Arguments: the port, and whether Serve is `told` what its processes have to find in their environment.
Prints as JSON what a running Serve lacks, and the status that a request with too many headers gets.
"""

from __future__ import annotations

import json
import os
import sys

import httpx
import ray
from ray import serve

from deploy.config import HttpConfig
from deploy.deployment import missing_environment, start_serve
from deploy.local_ray import RaySession
from deploy.openai.bounded_http import MAX_HEAD_BYTES


def main(port: int, *, is_told: bool) -> None:
    assert not any(name.startswith("RAY_SERVE_") for name in os.environ)
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    session = RaySession(address="there", num_cpus=None, show_logs=False)
    session._connect = lambda: None  # type: ignore[method-assign]
    session.open()
    wanted = session.serve_environment
    assert missing_environment(wanted) == {}, "no Serve runs"
    start_serve(HttpConfig(port=port), wanted if is_told else None)
    missing = missing_environment(wanted)
    head = {"x": "a" * MAX_HEAD_BYTES}
    answer = httpx.get(f"http://127.0.0.1:{port}/-/healthz", headers=head, timeout=30)
    print(json.dumps({"missing": sorted(missing), "status": answer.status_code}))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), is_told=sys.argv[2] == "told")
