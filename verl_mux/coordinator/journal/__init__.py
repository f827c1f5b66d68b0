"""What the coordinator remembers on disk.

`frames`: a file of numbered, checksummed pieces that shows whether it is whole; `epoch`: a second small file, which
notices when the first is gone or old; `lock`, `place`: whose they are and where; `journal`: all of it together;
`delivery`: what is said goes out when what it follows from is on disk. In the coordinator's process alone.
"""
