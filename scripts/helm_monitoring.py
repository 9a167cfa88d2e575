"""Write the chart's dashboards and rules: `.venv/bin/python scripts/helm_monitoring.py`.

Helm cannot run Python, so what `deploy/monitoring` generates lies in the chart as files. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.grafana import dashboard_file, grafana_json
from deploy.monitoring.rules import rules_yaml

CHART = Path(__file__).resolve().parent.parent / "helm" / "drafthouse"
FOLDERS = ("dashboards", "rules")


def rendered() -> dict[Path, str]:
    """Return all files that the folders hold, with their texts."""
    files = {}
    for page in map(grafana_json, ALL_DASHBOARDS):
        name, text = dashboard_file(page)
        files[CHART / "dashboards" / name] = text
    files[CHART / "rules" / "drafthouse.yaml"] = rules_yaml()
    return files


def main() -> None:
    files = rendered()
    for folder in FOLDERS:
        (CHART / folder).mkdir(exist_ok=True)
        for old in set((CHART / folder).iterdir()) - files.keys():
            old.unlink()
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
