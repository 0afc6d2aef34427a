"""Requests whose text an engine writes. Every other room reaches it by `EngineTexts.prepare`."""
