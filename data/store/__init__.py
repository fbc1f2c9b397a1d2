"""Durable files, object stores, heartbeats, fencing tokens, and the strict parser for untrusted files."""
