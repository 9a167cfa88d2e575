"""Series that doors report."""

from __future__ import annotations

REQUESTS = 'http_requests_total{status="200"}'
OPEN = "http_requests_in_progress"
