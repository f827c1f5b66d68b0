"""The report as JSON, tables, page and trace, from an Analysis and its findings. Runs in the report; called by
report_command.py."""
