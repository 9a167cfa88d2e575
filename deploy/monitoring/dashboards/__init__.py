"""One module for each dashboard; `ALL_DASHBOARDS` has them in the order in which they are read."""

from __future__ import annotations

from deploy.monitoring.dashboards.long_context import LONG_CONTEXT
from deploy.monitoring.dashboards.objectives import OBJECTIVES
from deploy.monitoring.dashboards.overview import OVERVIEW
from deploy.monitoring.dashboards.pools import POOLS
from deploy.monitoring.dashboards.speculation import SPECULATION
from deploy.monitoring.panels import Dashboard

ALL_DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, SPECULATION, POOLS, OBJECTIVES, LONG_CONTEXT)
