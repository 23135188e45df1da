"""Shows plans and runs to people: tables, plots, snapshots."""

from olla_fx.report.table import format_bytes, format_table

__all__ = ["format_bytes", "format_table"]
