"""The legs of gpu.py: functions by name, in order of value."""
