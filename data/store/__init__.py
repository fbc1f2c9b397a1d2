"""Durable files, object stores, heartbeats and fencing tokens; and the strict parser of everything that others wrote."""
