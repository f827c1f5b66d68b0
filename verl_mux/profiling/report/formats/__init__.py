"""Files of other programs, each by a reader of its own that yields lines of our event log: OpenTelemetry spans, verl's
metrics, SGLang's request log, Ray's timeline. foreign.py tells them apart by what is in them."""
