"""PromQL that panels and alerts are written in. Knows labels that scrapes add; must not know dashboards.

A release is told by the labels `namespace` and `app_kubernetes_io_instance`, which the chart's PodMonitor and the usual
scrape of annotated pods both give. A plain static scrape has neither: absent labels match `.*` and group as empty ones.
"""

import re

RELEASE_LABEL = "app_kubernetes_io_instance"
RELEASE = f"namespace, {RELEASE_LABEL}"
PROCESS = ("instance", "pod")
"""Labels of a process: the address, and in Kubernetes the pod's name, which people know it by."""
SCOPE = f'namespace=~"$namespace", {RELEASE_LABEL}=~"$release"'

ANSWERS = 'espalier_http_requests_total{route=~".*/completions"}'
TURNED_AWAY = 'espalier_http_requests_total{route=~".*/completions", code="429"}'
"""Of what has an answer that is generated: load balancers may ask for /health as often as they like."""

_SELECTOR = re.compile(r"\b(espalier_[a-z0-9_]+)(?:\{([^}]*)\})?")  # a metric of ours, and its matchers


def scoped(expr: str) -> str:
    """The expression about the namespaces and releases that a dashboard's variables name."""
    return _SELECTOR.sub(lambda found: f"{found[1]}{{{', '.join(filter(None, (SCOPE, found[2])))}}}", expr)


def rate(metric: str) -> str:
    """Per second, of a selector, over what Grafana finds right for the graph's resolution."""
    return f"rate({metric}[$__rate_interval])"


def quantile(share: float, buckets: str, *by: str) -> str:
    """The quantile of a histogram's `_bucket` selector, for each value of the labels `by`."""
    return f"histogram_quantile({share}, sum by ({', '.join(('le', *by))}) ({rate(buckets)}))"


def ratio(part: str, whole: str, *by: str) -> str:
    """One counter's rate over another's, for each value of the labels `by`."""
    return f"{total(part, *by)} / {total(whole, *by)}"


def total(counter: str, *by: str) -> str:
    """The summed rate of a counter, for each value of the labels `by`."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} ({rate(counter)})"
