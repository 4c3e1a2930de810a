"""All formats, by name: one file and one record each."""

from __future__ import annotations

from qrot.export.format import Format
from qrot.records import collect

FORMATS: dict[str, Format] = collect("qrot.export.formats", Format)
