"""From a run's files to tables; unreadable lines are counted by reason. Runs in the report's processes; imports plain/,
eventlog/."""
