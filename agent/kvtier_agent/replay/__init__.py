"""Replay: drive a real agent with a request trace and verify every byte that comes back.

It uses `kvtier_agent.server.client` only, like any engine.
"""
