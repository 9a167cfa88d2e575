"""The cluster: coordinator, membership, placement, routing, recovery, autoscaling policies."""
