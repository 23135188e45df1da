"""The loops whose memory ``process_memory.py`` measures, and their measurement, one in a process."""
