"""Grafana dashboards, Prometheus rules and alerts, written as typed code over the catalogue of series."""
