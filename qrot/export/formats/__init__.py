"""The formats, one file and one record each (`qrot.export.registry`)."""
