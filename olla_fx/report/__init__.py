"""Plans and runs for people: tables, plots, snapshots."""

from olla_fx.report.table import StepReport, format_bytes, format_table, plan_rows

__all__ = ["StepReport", "format_bytes", "format_table", "plan_rows"]
