"""Requests whose text an engine writes. Other packages call only `EngineTexts.prepare`."""
