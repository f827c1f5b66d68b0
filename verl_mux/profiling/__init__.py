"""The event log of jobs and coordinator: eventlog/ writes it, plain/ reads it without a library for readers, report/ reads it in
bulk. Arrows run report -> plain -> eventlog.
"""
