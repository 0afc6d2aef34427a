"""Requests whose text an engine writes. Other packages call it by `EngineText`."""
