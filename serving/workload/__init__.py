"""Workloads: request traces, their open-loop replay, and what a run's timelines say."""
