"""The loops whose memory ``process_memory.py`` measures, and the measurement of one of them in one process."""
