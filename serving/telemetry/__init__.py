"""Metrics, traces and logs: the only modules that know an exporter."""
