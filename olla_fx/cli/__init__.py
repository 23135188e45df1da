"""The command ``olla-fx``."""
