"""Engines: vLLM, the simulated replica, and the pools that hold them."""
