"""Metrics for Prometheus: what is counted, how it is rendered at a scrape, and where it is served.

It is no sink: the first rank of each host takes part, and counts must be read before a resume drops records. All
imports of prometheus_client and pynvml, which an extra brings, are inside functions.
"""
